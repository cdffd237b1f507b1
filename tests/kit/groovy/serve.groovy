// Runs scripts one after the other, each as a JVM of its own would: to start one and to compile what a build needs
// takes it seconds. A line of JSON {"script", "text"} on standard input, which the script reads as its own; then one
// on standard output: {"out"} that it printed, and the {"error"} that ended it, or null.
import groovy.json.JsonOutput
import groovy.json.JsonSlurper

def answers = System.out
System.in.eachLine('UTF-8') { line ->
    def asked = new JsonSlurper().parseText(line)
    def said = new ByteArrayOutputStream()
    System.setIn(new ByteArrayInputStream(asked.text.getBytes('UTF-8')))
    System.setOut(new PrintStream(said, true, 'UTF-8'))
    String error = null
    try {
        // a shell has a class loader of its own: no script sees what another left in static fields
        new GroovyShell(ClassLoader.systemClassLoader).parse(new File(asked.script)).run()
    } catch (Throwable thrown) {
        def trace = new StringWriter()
        thrown.printStackTrace(new PrintWriter(trace))
        error = trace
    }
    answers.println(JsonOutput.toJson([out: said.toString('UTF-8'), error: error]))
    answers.flush()
}
