// Runs one Declarative Jenkinsfile on Jenkins' own CPS engine (groovy-cps), stage by stage, with real `sh`.
// Standard input: {"file", "workspace", "parameters", "environment", "abort"}; once the file `abort` exists, the
// build is aborted. The last line of standard output: {"result", "stages": [[name, result], ...], "error"}.
// Or {"check": [FILE, ...]}: nothing is run, and the line says what is wrong with each file, or null.
//
// It knows what `mlpipe render --for jenkins` writes and refuses all else by name. What it cannot say: whether
// Jenkins takes an option, an agent or a plugin's step; timeouts never pass; the text of a step that has a
// block is run to its end within the step.
import com.cloudbees.groovy.cps.Continuation
import com.cloudbees.groovy.cps.CpsTransformer
import com.cloudbees.groovy.cps.SerializableScript
import com.cloudbees.groovy.cps.impl.CpsCallableInvocation
import groovy.json.JsonOutput
import groovy.json.JsonSlurper
import java.util.concurrent.TimeUnit
import org.codehaus.groovy.ast.ClassNode
import org.codehaus.groovy.ast.expr.*
import org.codehaus.groovy.ast.stmt.*
import org.codehaus.groovy.classgen.GeneratorContext
import org.codehaus.groovy.control.CompilePhase
import org.codehaus.groovy.control.CompilerConfiguration
import org.codehaus.groovy.control.SourceUnit
import org.codehaus.groovy.control.customizers.CompilationCustomizer

class Refused extends RuntimeException {
    Refused(String message) { super(message) }
}

class Aborted extends RuntimeException {
    Aborted(String message) { super(message) }
}

/** `pipeline {}` becomes a literal of maps, lists and closures, so that the closures belong to the script. */
class Model extends CompilationCustomizer {
    static final OPTIONS = ['buildDiscarder', 'durabilityHint', 'parallelsAlwaysFailFast', 'timeout']
    static final PARAMETERS = ['text', 'choice', 'booleanParam', 'string']
    static final STEPS = ['sh', 'writeFile', 'archiveArtifacts', 'timeout', 'script']
    static final POST = ['always', 'aborted', 'success', 'failure', 'cleanup']

    private final Set<String> names = []

    Model() { super(CompilePhase.CONVERSION) }

    void call(SourceUnit source, GeneratorContext context, ClassNode node) {
        BlockStatement body = node.getDeclaredMethods('run')[0].code
        def calls = body.statements.collect { callOf(it, 'the file') }
        if (calls*.methodAsString != ['pipeline']) {
            throw new Refused("the file has ${calls*.methodAsString}, not one pipeline")
        }
        def model = pipeline(blockOf(calls[0]))
        body.statements.clear()
        body.addStatement(new ReturnStatement(model))
    }

    Expression pipeline(ClosureExpression block) {
        def found = sections(block, 'pipeline', [
            agent: { only(blockOf(it), 'agent', ['label']); new ConstantExpression(true) },
            options: { only(blockOf(it), 'options', OPTIONS); new ConstantExpression(true) },
            parameters: { call -> list(callsOf(blockOf(call), 'parameters').collect { parameter(it) }) },
            environment: { call -> environment(blockOf(call)) },
            stages: { call -> stages(call) },
            post: { call -> sections(blockOf(call), 'post', POST.collectEntries { [(it): { c -> steps(c) }] }) },
        ])
        require(found, 'pipeline', ['agent', 'stages'])
        found
    }

    Expression stages(MethodCallExpression call) {
        def all = callsOf(blockOf(call), call.methodAsString)
        only(blockOf(call), call.methodAsString, ['stage'])
        if (all.empty) {
            throw new Refused("${call.methodAsString} has no stage")
        }
        list(all.collect { stage(it) })
    }

    Expression stage(MethodCallExpression call) {
        def name = call.arguments.expressions[0]
        if (!(name instanceof ConstantExpression && name.value instanceof String)) {
            throw new Refused("a stage's name is ${name.text}")
        }
        if (!names.add(name.value)) {
            throw new Refused("two stages are named '${name.value}'")
        }
        def found = sections(blockOf(call), "stage '${name.text}'", [
            when: { w -> condition(blockOf(w)) },
            options: { o -> only(blockOf(o), 'options of a stage', ['timeout']); new ConstantExpression(true) },
            steps: { s -> steps(s) },
            parallel: { p -> stages(p) },
        ])
        def keys = found.mapEntryExpressions*.keyExpression*.value
        if (('steps' in keys) == ('parallel' in keys)) {
            throw new Refused("stage '${name.text}' needs steps or parallel")
        }
        found.addMapEntryExpression(new ConstantExpression('name'), name)
        found
    }

    Expression steps(MethodCallExpression call) {
        def unknown = callsOf(blockOf(call), 'steps')*.methodAsString - STEPS
        if (unknown || callsOf(blockOf(call), 'steps').empty) {
            throw new Refused("steps has ${unknown ? unknown.join(', ') : 'nothing'}")
        }
        blockOf(call)
    }

    Expression condition(ClosureExpression block, boolean wanted = true) {
        def calls = callsOf(block, 'when')
        if (calls*.methodAsString == ['not']) {
            return condition(blockOf(calls[0]), !wanted)
        }
        if (calls*.methodAsString != ['expression']) {
            throw new Refused("when has ${calls*.methodAsString}")
        }
        map(wanted: new ConstantExpression(wanted), expression: blockOf(calls[0]))
    }

    Expression parameter(MethodCallExpression call) {
        if (!(call.methodAsString in PARAMETERS)) {
            throw new Refused("parameters has ${call.methodAsString}")
        }
        new MapExpression(call.arguments.expressions[0].mapEntryExpressions)
    }

    Expression environment(ClosureExpression block) {
        def found = new MapExpression()
        block.code.statements.each { statement ->
            def set = statement instanceof ExpressionStatement ? statement.expression : null
            if (!(set instanceof BinaryExpression && set.operation.text == '=')) {
                throw new Refused("environment has ${statement.text}")
            }
            def value = new ClosureExpression([] as org.codehaus.groovy.ast.Parameter[],
                new BlockStatement([new ReturnStatement(set.rightExpression)] as Statement[],
                    new org.codehaus.groovy.ast.VariableScope()))
            value.variableScope = new org.codehaus.groovy.ast.VariableScope()
            found.addMapEntryExpression(new ConstantExpression(set.leftExpression.text), value)
        }
        found
    }

    static MapExpression sections(ClosureExpression block, String where, Map<String, Closure> known) {
        def found = new MapExpression()
        def seen = []
        callsOf(block, where).each { call ->
            String name = call.methodAsString
            if (!known.containsKey(name) || name in seen) {
                throw new Refused("$where has ${name in seen ? 'a second ' : ''}$name")
            }
            seen << name
            found.addMapEntryExpression(new ConstantExpression(name), known[name](call))
        }
        found
    }

    static void only(ClosureExpression block, String where, List<String> known) {
        callsOf(block, where).each {
            if (!(it.methodAsString in known)) {
                throw new Refused("$where has ${it.methodAsString}")
            }
        }
    }

    static void require(MapExpression found, String where, List<String> names) {
        def missing = names - found.mapEntryExpressions*.keyExpression*.value
        if (missing) {
            throw new Refused("$where has no ${missing.join(', ')}")
        }
    }

    static List<MethodCallExpression> callsOf(ClosureExpression block, String where) {
        block.code.statements.findAll { !(it instanceof EmptyStatement) }.collect { callOf(it, where) }
    }

    static MethodCallExpression callOf(Statement statement, String where) {
        def found = statement instanceof ExpressionStatement || statement instanceof ReturnStatement ?
            statement.expression : null
        if (!(found instanceof MethodCallExpression && found.implicitThis)) {
            throw new Refused("$where has ${statement.text}")
        }
        found
    }

    static ClosureExpression blockOf(MethodCallExpression call) {
        def last = call.arguments.expressions ? call.arguments.expressions[-1] : null
        if (!(last instanceof ClosureExpression)) {
            throw new Refused("${call.methodAsString} has no block")
        }
        last
    }

    static MapExpression map(Map<String, Expression> entries) {
        def found = new MapExpression()
        entries.each { key, value -> found.addMapEntryExpression(new ConstantExpression(key), value) }
        found
    }

    static ListExpression list(List<Expression> items) { new ListExpression(items) }
}

/** The build under way. */
class Running {
    static File workspace
    static File abort
    static Map environment
    static Map parameters
    static boolean inPost = false
    static final List stages = Collections.synchronizedList([])
    static final ThreadLocal<Map> added = new InheritableThreadLocal<Map>()
    /** Of the parallel around: empty until a branch of it has failed. */
    static final ThreadLocal<List> stopped = new InheritableThreadLocal<List>()

    static Object run(Closure block) {
        try {
            return block.call()
        } catch (CpsCallableInvocation invocation) {
            try {
                return invocation.invoke(null, null, Continuation.HALT).run().yield.replay()
            } catch (java.lang.reflect.InvocationTargetException error) {
                throw error.cause
            }
        }
    }

    static void stage(String name, Closure body) {
        def entry = [name, 'SUCCESS']
        stages << entry
        try {
            body()
        } catch (Throwable error) {
            entry[1] = error instanceof Aborted ? 'ABORTED' : 'FAILURE'
            throw error
        }
    }

    static void parallel(Map<String, Closure> branches) {
        def group = Collections.synchronizedList([])
        def errors = Collections.synchronizedList([])
        def threads = branches.collect { name, body ->
            Thread.start {
                stopped.set(group)
                try {
                    body()
                } catch (Throwable error) {
                    errors << error
                    group << name
                }
            }
        }
        threads*.join()
        if (errors) {
            throw errors.find { !(it instanceof Aborted) } ?: errors[0]
        }
    }

    static void sh(String script) {
        def log = new File(workspace.parentFile, 'log')
        def builder = new ProcessBuilder('setsid', '/bin/sh', '-xe', '-c', script).directory(workspace)
        builder.environment().putAll(environment + (added.get() ?: [:]))
        builder.redirectErrorStream(true).redirectOutput(ProcessBuilder.Redirect.appendTo(log))
        def process = builder.start()
        process.outputStream.close()
        boolean told = false
        while (!process.waitFor(50, TimeUnit.MILLISECONDS)) {
            if (!told && isStopped()) {
                told = true
                ['kill', '-TERM', '--', "-${process.pid()}"].execute().waitFor()
            }
        }
        if (told) {
            throw new Aborted('aborted')
        }
        if (process.exitValue()) {
            throw new RuntimeException("script returned exit code ${process.exitValue()}")
        }
    }

    static boolean isStopped() { !inPost && (abort.exists() || stopped.get()) }
}

/** The steps. Whatever is not here is refused by its name. */
abstract class Steps extends SerializableScript {
    void sh(String script) {
        if (Running.isStopped()) { throw new Aborted('aborted') }
        Running.sh(script)
    }

    void writeFile(Map given) {
        byte[] data = given.encoding == 'Base64' ? given.text.decodeBase64() : given.text.getBytes('UTF-8')
        def file = new File(Running.workspace, given.file)
        file.parentFile.mkdirs()
        file.bytes = data
    }

    String readFile(String name) { new File(Running.workspace, name).getText('UTF-8') }

    void archiveArtifacts(Map given) {
        given.artifacts.split(',').each { name ->
            def file = new File(Running.workspace, name)
            if (file.exists()) {
                new File(Running.workspace.parentFile, "archived-${file.name}").bytes = file.bytes
            }
        }
    }

    Object timeout(Map given, Closure block) { Running.run(block) }

    Object script(Closure block) { Running.run(block) }

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

void walk(Map stage) {
    if (stage.when && (Running.run(stage.when.expression) as boolean) != stage.when.wanted) {
        Running.stages << [stage.name, 'SKIPPED']
        return
    }
    Running.stage(stage.name) {
        if (stage.parallel) {
            Running.parallel(stage.parallel.collectEntries { branch -> [(branch.name): { walk(branch) }] })
        } else {
            Running.run(stage.steps)
        }
    }
}

def asked = new JsonSlurper().parse(System.in)
if (asked.check) {
    println JsonOutput.toJson(asked.check.collectEntries { name ->
        def configuration = new CompilerConfiguration(scriptBaseClass: 'Steps', sourceEncoding: 'UTF-8')
        configuration.addCompilationCustomizers(new Model(), new CpsTransformer())
        try {
            new GroovyShell(this.class.classLoader, new Binding(), configuration).parse(new File(name))
            return [(name): null]
        } catch (Throwable error) {
            return [(name): "${error.class.simpleName}: ${error.message}".toString()]
        }
    })
    return
}
Running.workspace = new File(asked.workspace)
Running.abort = new File(asked.abort)
String result = 'SUCCESS'
String said = null
try {
    def configuration = new CompilerConfiguration(scriptBaseClass: 'Steps', sourceEncoding: 'UTF-8')
    configuration.addCompilationCustomizers(new Model(), new CpsTransformer())
    def script = new GroovyShell(this.class.classLoader, new Binding(), configuration).parse(new File(asked.file))
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
    Running.environment = asked.environment + Running.parameters.collectEntries { key, value -> [key, "$value".toString()] }
    (model.environment ?: [:]).each { name, value -> Running.environment[name] = Running.run(value).toString() }
    try {
        model.stages.each { walk(it) }
    } catch (Throwable error) {
        result = error instanceof Aborted ? 'ABORTED' : 'FAILURE'
        said = error.toString()
    }
    Running.inPost = true
    def names = ['always', result == 'SUCCESS' ? 'success' : result == 'ABORTED' ? 'aborted' : 'failure', 'cleanup']
    names.each { name ->
        if (model.post && model.post[name]) {
            try {
                Running.run(model.post[name])
            } catch (Throwable error) {
                result = result == 'SUCCESS' ? 'FAILURE' : result
                said = "post $name: $error"
            }
        }
    }
} catch (Throwable error) {
    result = 'REFUSED'
    said = "${error.class.simpleName}: ${error.message}"
}
println JsonOutput.toJson([result: result, stages: Running.stages, error: said])
