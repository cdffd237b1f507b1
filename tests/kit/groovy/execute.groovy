// Runs one Declarative Jenkinsfile on Jenkins' own CPS engine (groovy-cps), stage by stage, with real `sh`.
// Standard input: {"file", "workspace", "parameters", "environment", "abort"}; once the file `abort` exists, the
// build is aborted. Further: "repository", which each agent checks out into a fresh workspace; "input": approve
// or deny, else nobody answers; "timeouts": {STAGE: seconds}, of options of stages, which else never pass. The last
// line of standard output: {"result", "stages": [[name, result], ...], "events", "error"}.
// Or {"check": [FILE, ...]}: nothing is run, and the line says what is wrong with each file, or null.
//
// It knows what `mlpipe render --for jenkins` writes and what the repository's Jenkinsfile uses, and refuses all
// else by name. What it cannot say: whether Jenkins takes an option, an agent or a plugin's step.
import com.cloudbees.groovy.cps.Continuation
import com.cloudbees.groovy.cps.CpsTransformer
import com.cloudbees.groovy.cps.SerializableScript
import com.cloudbees.groovy.cps.impl.CpsCallableInvocation
import groovy.json.JsonOutput
import groovy.json.JsonSlurper
import org.codehaus.groovy.control.CompilerConfiguration

/** The steps. Whatever is not here is refused by its name. */
abstract class Steps extends SerializableScript {
    void sh(String script) {
        if (Running.isStopped()) { throw new Aborted('aborted') }
        Running.sh(script)
    }

    void writeFile(Map given) {
        byte[] data = given.encoding == 'Base64' ? given.text.decodeBase64() : given.text.getBytes('UTF-8')
        def file = new File(Running.here(), given.file)
        file.parentFile.mkdirs()
        file.bytes = data
    }

    String readFile(String name) { new File(Running.here(), name).getText('UTF-8') }

    void echo(String message) { Running.say(message) }

    void checkout(Object scm) { Running.checkout() }

    void archiveArtifacts(Map given) {
        def found = given.artifacts.split(',').collectMany { Running.matching(it) }
        if (found.empty && !given.allowEmptyArchive) {
            throw new RuntimeException("No artifacts found that match the file pattern ${given.artifacts}")
        }
        found.each { new File(Running.root, "archived-${it.name}").bytes = it.bytes }
    }

    void junit(String testResults) { junit(testResults: testResults) }

    void junit(Map given) {
        def found = Running.matching(given.testResults)
        if (found.empty && !given.allowEmptyResults) {
            throw new RuntimeException('No test report files were found. Configuration error?')
        }
        found.each {
            def suite = new XmlSlurper().parse(it)
            int bad = suite.testcase.findAll { one -> one.failure.size() + one.error.size() > 0 }.size()
            Running.events << "junit ${suite.testcase.size()} tests, $bad failed".toString()
            Running.unstable |= bad > 0
        }
    }

    Object node(String label, Closure block) { Running.node(label, false) { Running.run(block) } }

    Object timeout(Map given, Closure block) { Running.run(block) }

    Object script(Closure block) { Running.run(block) }

    void catchError(Map given, Closure block) { Running.catchError(given) { Running.run(block) } }

    void stage(String name, Closure block) { Running.stage(name) { Running.run(block) } }

    Object withEnv(List variables, Closure block) {
        def before = Running.added.get()
        Running.added.set((before ?: [:]) + variables.collectEntries { it.toString().split('=', 2) as List })
        try {
            return Running.run(block)
        } finally {
            Running.added.set(before)
        }
    }

    void parallel(Map branches) {
        Running.parallel(branches.collectEntries { name, block -> [(name): { Running.run(block) }] })
    }
}

boolean wanted(Map when) {
    when.all.every { wanted, found ->
        boolean is = found == 'changeRequest' ? Running.environment.CHANGE_ID != null : Running.run(found) as boolean
        is == wanted
    }
}

/** In the order of Declarative: a plain `when` comes after options, input and agent. */
void walk(Map stage) {
    if (stage.when?.before && !wanted(stage.when)) {
        Running.stages << [stage.name, 'SKIPPED']
        return
    }
    Running.options(stage.name, stage.options ?: []) {
        if (stage.input) {
            Running.stage(stage.name) { Running.input(stage.input.message); within(stage) }
        } else {
            within(stage)
        }
    }
}

void within(Map stage) {
    def body = {
        if (stage.when && !stage.when.before && !wanted(stage.when)) {
            Running.stages << [stage.name, 'SKIPPED']
            return
        }
        stage.input ? inside(stage) : Running.stage(stage.name) { inside(stage) }
    }
    def label = stage.agent?.label == null ? null : Running.run(stage.agent.label).toString()
    label == null ? body() : Running.node(label, true, body)
}

void inside(Map stage) {
    def before = Running.added.get()
    Running.added.set((before ?: [:]) + (stage.environment ?: [:]).collectEntries { name, value ->
        [(name): Running.run(value).toString()]
    })
    Throwable thrown = null
    try {
        if (stage.parallel) {
            Running.parallel(stage.parallel.collectEntries { branch -> [(branch.name): { walk(branch) }] })
        } else if (stage.stages) {
            stage.stages.each { walk(it) }
        } else {
            Running.run(stage.steps)
        }
    } catch (Throwable error) {
        thrown = error
    } finally {
        Running.added.set(before)
    }
    if (stage.post) {
        thrown = after(stage.post, thrown)
    }
    if (thrown) {
        throw thrown
    }
}

/** In their fixed order; the first error of a post is the block's, unless it had one. */
Throwable after(Map post, Throwable thrown) {
    for (name in ['always', 'aborted', 'success', 'unsuccessful', 'unstable', 'failure', 'cleanup']) {
        String result = thrown ? (thrown instanceof Aborted ? 'aborted' : 'failure') : Running.unstable ? 'unstable' :
            'success'
        boolean due = name in ['always', 'cleanup', result] || (name == 'unsuccessful' && result != 'success')
        if (due && post[name]) {
            try {
                Running.run(post[name])
            } catch (Throwable error) {
                Running.say("post $name: $error")
                thrown = thrown ?: error
            }
        }
    }
    thrown
}

CompilerConfiguration configured() {
    def configuration = new CompilerConfiguration(scriptBaseClass: 'Steps', sourceEncoding: 'UTF-8')
    configuration.addCompilationCustomizers(new Model(), new CpsTransformer())
    configuration
}

Script parsed(String file) {
    new GroovyShell(this.class.classLoader, new Binding(), configured()).parse(new File(file))
}

def asked = new JsonSlurper().parse(System.in)
if (asked.check) {
    println JsonOutput.toJson(asked.check.collectEntries { name ->
        try {
            parsed(name)
            return [(name): null]
        } catch (Throwable error) {
            def own = error.message =~ /(?m)^(Wrong|Refused): .*$/
            return [(name): (own ? own[0][0] : "${error.class.simpleName}: ${error.message}").toString()]
        }
    })
    return
}
Running.prepare(asked)
String result = 'SUCCESS'
String said = null
try {
    def script = parsed(asked.file)
    def model = null
    try {
        model = script.run()
    } catch (CpsCallableInvocation invocation) {
        model = invocation.invoke(null, null, Continuation.HALT).run().yield.replay()
    }
    Running.parameters = (model.parameters ?: []).collectEntries {
        [(it.name): it.defaultValue != null ? it.defaultValue : it.choices[0]]
    } + asked.parameters
    script.binding.setVariable('params', Running.parameters)
    script.binding.setVariable('currentBuild', [startTimeInMillis: 1700000000000L])
    script.binding.setVariable('scm', 'scm')
    script.binding.setVariable('env', Running.environment)
    Running.environment += Running.parameters.collectEntries { key, value -> [key, "$value".toString()] }
    script.binding.setVariable('env', Running.environment)
    Running.failFast = (model.options ?: []).any { it.option == 'parallelsAlwaysFailFast' }
    (model.environment ?: [:]).each { name, value -> Running.environment[name] = Running.run(value).toString() }
    Throwable thrown = null
    def whole = {
        try {
            model.stages.each { walk(it) }
        } catch (Throwable error) {
            thrown = error
        }
        said = thrown?.toString()
        Running.inPost = true
        thrown = model.post ? after(model.post, thrown) : thrown
        said = said ?: thrown?.toString()
    }
    def label = model.agent.label
    label == null ? whole() : Running.node(Running.run(label).toString(), true, whole)
    result = thrown ? (thrown instanceof Aborted ? 'ABORTED' : 'FAILURE') : Running.unstable ? 'UNSTABLE' : 'SUCCESS'
} catch (Throwable error) {
    result = 'REFUSED'
    said = "${error.class.simpleName}: ${error.message}"
}
println JsonOutput.toJson([result: result, stages: Running.stages, events: Running.events, error: said])
