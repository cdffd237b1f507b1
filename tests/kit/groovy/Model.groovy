// A Declarative pipeline, checked over its syntax tree and turned into data. `Wrong`: no Jenkins would take it.
// `Refused`: it may be right, but the interpreter does not know it. The grammar is that of jenkins.io ("Pipeline
// Syntax"), written down here anew; options, agents, conditions and steps of plugins are those in the tables.
import org.codehaus.groovy.ast.ClassNode
import org.codehaus.groovy.ast.VariableScope
import org.codehaus.groovy.ast.expr.*
import org.codehaus.groovy.ast.stmt.*
import org.codehaus.groovy.classgen.GeneratorContext
import org.codehaus.groovy.control.CompilePhase
import org.codehaus.groovy.control.SourceUnit
import org.codehaus.groovy.control.customizers.CompilationCustomizer

class Wrong extends RuntimeException {
    Wrong(String message) { super(message) }
}

class Refused extends RuntimeException {
    Refused(String message) { super(message) }
}

/** `pipeline {}` becomes a literal of maps, lists and closures, so that the closures belong to the script. */
class Model extends CompilationCustomizer {
    static final SECTIONS = ['agent', 'environment', 'libraries', 'options', 'parameters', 'post', 'stages',
        'tools', 'triggers']
    static final STAGE = ['agent', 'environment', 'failFast', 'input', 'matrix', 'options', 'parallel', 'post',
        'stages', 'steps', 'tools', 'when']
    static final UNKNOWN_HERE = ['libraries', 'tools', 'triggers', 'matrix', 'failFast']
    static final POST = ['always', 'aborted', 'changed', 'cleanup', 'failure', 'fixed', 'notBuilt', 'regression',
        'success', 'unstable', 'unsuccessful']
    static final AGENTS = ['label', 'node', 'docker', 'dockerfile', 'kubernetes']
    static final STAGE_OPTIONS = ['catchError', 'lock', 'retry', 'skipDefaultCheckout', 'throttle', 'timeout',
        'timestamps', 'warnError', 'withCredentials']
    static final OPTIONS = STAGE_OPTIONS + ['ansiColor', 'buildDiscarder', 'checkoutToSubdirectory',
        'copyArtifactPermission', 'disableConcurrentBuilds', 'disableResume', 'disableRestartFromStage',
        'durabilityHint', 'newContainerPerStage', 'overrideIndexTriggers', 'parallelsAlwaysFailFast',
        'preserveStashes', 'quietPeriod', 'rateLimitBuilds', 'skipStagesAfterUnstable']
    static final PARAMETERS = ['booleanParam', 'choice', 'credentials', 'file', 'password', 'run', 'string',
        'text']
    static final CONDITIONS = ['allOf', 'anyOf', 'branch', 'buildingTag', 'changeRequest', 'changelog',
        'changeset', 'environment', 'equals', 'expression', 'isRestartedRun', 'not', 'tag', 'triggeredBy']
    static final BEFORE = ['beforeAgent', 'beforeInput', 'beforeOptions']
    static final INPUT = ['id', 'message', 'ok', 'parameters', 'submitter', 'submitterParameter']
    static final UNITS = ['NANOSECONDS', 'MICROSECONDS', 'MILLISECONDS', 'SECONDS', 'MINUTES', 'HOURS', 'DAYS']
    /** Of each step, the names of its parameters; the first is the one that may stand without its name. */
    static final STEPS = [
        archiveArtifacts: ['artifacts', 'allowEmptyArchive', 'fingerprint'],
        checkout: ['scm'],
        echo: ['message'],
        error: ['message'],
        junit: ['testResults', 'allowEmptyResults'],
        node: ['label', ''],
        parallel: ['', ''],
        readFile: ['file', 'encoding'],
        script: [''],
        sh: ['script', 'returnStatus', 'returnStdout', 'label', 'encoding'],
        stage: ['name', ''],
        timeout: ['time', 'unit', ''],
        withEnv: ['overrides', ''],
        writeFile: ['file', 'text', 'encoding'],
    ]
    static final BLOCKS = ['node', 'script', 'timeout', 'withEnv']

    private final Set<String> names = []

    Model() { super(CompilePhase.CONVERSION) }

    void call(SourceUnit source, GeneratorContext context, ClassNode node) {
        BlockStatement body = node.getDeclaredMethods('run')[0].code
        def calls = body.statements.collect { callOf(it, 'the file') }
        if (calls*.methodAsString != ['pipeline']) {
            throw new Wrong("the file has ${calls*.methodAsString}, not one pipeline")
        }
        def model = pipeline(blockOf(calls[0]))
        body.statements.clear()
        body.addStatement(new ReturnStatement(model))
    }

    Expression pipeline(ClosureExpression block) {
        def found = sections(block, 'pipeline', SECTIONS, [
            agent: { agent(it) },
            options: { options(it, 'options', OPTIONS) },
            parameters: { call -> list(callsOf(blockOf(call), 'parameters').collect { parameter(it) }) },
            environment: { environment(blockOf(it)) },
            stages: { stages(it, false) },
            post: { post(it) },
        ])
        require(found, 'pipeline', ['agent', 'stages'])
        found
    }

    Expression stages(MethodCallExpression call, boolean inParallel) {
        String where = call.methodAsString
        def all = callsOf(blockOf(call), where)
        if (all.empty) {
            throw new Wrong("$where has no stage")
        }
        all.each {
            if (it.methodAsString != 'stage') { throw new Wrong("$where has ${it.methodAsString}") }
        }
        list(all.collect { stage(it, inParallel || where == 'parallel') })
    }

    Expression stage(MethodCallExpression call, boolean inParallel) {
        def given = call.arguments.expressions
        if (given.size() != 2 || !isText(given[0])) {
            throw new Wrong("a stage's name is ${given.size() == 2 ? given[0].text : 'missing'}")
        }
        String name = given[0].value
        if (name.trim().empty) {
            throw new Wrong("a stage's name is empty")
        }
        if (!names.add(name)) {
            throw new Wrong("two stages are named '$name'")
        }
        String where = "stage '$name'"
        def block = blockOf(call)
        def keys = callsOf(block, where)*.methodAsString
        def bodies = keys.findAll { it in ['steps', 'stages', 'parallel', 'matrix'] }.unique()
        if (bodies.size() != 1 && keys.every { it in STAGE }) {
            throw new Wrong("$where has ${bodies ? bodies.join(' and ') : 'none of steps, stages, parallel, matrix'}")
        }
        if ('failFast' in keys && !('parallel' in keys || 'matrix' in keys)) {
            throw new Wrong("$where has failFast without parallel")
        }
        if (inParallel && ('parallel' in keys || 'matrix' in keys)) {
            throw new Wrong("$where has ${bodies[0]} within parallel")
        }
        def found = sections(block, where, STAGE, [
            agent: { agent(it) },
            environment: { environment(blockOf(it)) },
            when: { condition(blockOf(it)) },
            options: { options(it, "options of $where", STAGE_OPTIONS) },
            input: { input(it) },
            steps: { steps(it, 'steps') },
            stages: { stages(it, inParallel) },
            parallel: { stages(it, inParallel) },
            post: { post(it) },
        ])
        found.addMapEntryExpression(new ConstantExpression('name'), given[0])
        found
    }

    Expression post(MethodCallExpression call) {
        def found = sections(blockOf(call), 'post', POST, POST.collectEntries { [(it): { c -> steps(c, it) }] })
        if (found.mapEntryExpressions.empty) {
            throw new Wrong('post has no condition')
        }
        found.mapEntryExpressions*.keyExpression*.value.each {
            if (it in ['changed', 'fixed', 'regression', 'notBuilt']) { throw new Refused("post has $it") }
        }
        found
    }

    Expression agent(MethodCallExpression call) {
        def given = call.arguments.expressions
        if (given.size() == 1 && given[0] instanceof VariableExpression && given[0].name in ['any', 'none']) {
            return map(label: new ConstantExpression(given[0].name == 'any' ? '' : null))
        }
        if (given.size() != 1 || !(given[0] instanceof ClosureExpression)) {
            throw new Wrong("agent is ${given ? given[0].text : 'nothing'}: write any, none or a block")
        }
        def types = callsOf(given[0], 'agent')
        if (types.empty) {
            throw new Wrong("agent names none of ${AGENTS.join(', ')}")
        }
        types.each {
            if (!(it.methodAsString in AGENTS)) { throw new Wrong("agent has ${it.methodAsString}") }
        }
        if (types.size() > 1) {
            throw new Wrong("agent has ${types*.methodAsString.join(' and ')}")
        }
        if (types[0].methodAsString != 'label') {
            throw new Refused("agent has ${types[0].methodAsString}")
        }
        map(label: later(single(types[0], 'label')))
    }

    Expression options(MethodCallExpression call, String where, List<String> known) {
        def calls = callsOf(blockOf(call), where)
        if (calls.empty) {
            throw new Wrong("$where is empty")
        }
        once(calls*.methodAsString, where)
        calls.each {
            if (!(it.methodAsString in known)) {
                throw new Wrong("$where has ${it.methodAsString}")
            }
            if (it.methodAsString == 'timeout') {
                timeout(it, false)
            }
            if (it.methodAsString == 'retry' && !(single(it, 'retry').value instanceof Integer)) {
                throw new Wrong("retry is ${single(it, 'retry').text}, not a number")
            }
        }
        list(calls.findAll { it.methodAsString in ['timeout', 'lock', 'parallelsAlwaysFailFast'] }.collect {
            def entries = it.methodAsString == 'parallelsAlwaysFailFast' ? [] : named(it, it.methodAsString)
            if (it.methodAsString == 'lock' && entries*.keyExpression*.value != ['resource']) {
                throw new Refused("lock has ${entries*.keyExpression*.value}")
            }
            entries.add(0, new MapEntryExpression(new ConstantExpression('option'),
                new ConstantExpression(it.methodAsString)))
            new MapExpression(entries)
        })
    }

    static void timeout(MethodCallExpression call, boolean block) {
        def entries = named(call, 'timeout').collectEntries { [(it.keyExpression.value): it.valueExpression] }
        def unknown = entries.keySet() - ['time', 'unit', 'activity']
        if (unknown) {
            throw new Wrong("timeout has ${unknown.join(', ')}")
        }
        if (!(entries.time instanceof ConstantExpression && entries.time.value instanceof Integer)) {
            throw new Wrong("timeout's time is ${entries.time ? entries.time.text : 'missing'}")
        }
        if (entries.unit && !(entries.unit.value in UNITS)) {
            throw new Wrong("timeout's unit is ${entries.unit.text}")
        }
        if (block && !(call.arguments.expressions[-1] instanceof ClosureExpression)) {
            throw new Wrong('timeout has no block')
        }
    }

    Expression input(MethodCallExpression call) {
        def calls = callsOf(blockOf(call), 'input')
        once(calls*.methodAsString, 'input')
        calls.each {
            if (!(it.methodAsString in INPUT)) { throw new Wrong("input has ${it.methodAsString}") }
            if (it.methodAsString == 'parameters') { throw new Refused('input has parameters') }
        }
        if (!('message' in calls*.methodAsString)) {
            throw new Wrong('input has no message')
        }
        def found = new MapExpression()
        calls.each {
            found.addMapEntryExpression(new ConstantExpression(it.methodAsString), single(it, it.methodAsString))
        }
        found
    }

    /** [before: whether it comes before options, agent and input, all: [[wanted, kind, value], ...]] */
    Expression condition(ClosureExpression block) {
        def calls = callsOf(block, 'when')
        def (flags, rest) = calls.split { it.methodAsString in BEFORE }
        once(flags*.methodAsString, 'when')
        flags.each {
            if (!(single(it, it.methodAsString).value instanceof Boolean)) {
                throw new Wrong("${it.methodAsString} is ${single(it, it.methodAsString).text}")
            }
        }
        if (rest.empty) {
            throw new Wrong('when has no condition')
        }
        def on = flags.findAll { single(it, it.methodAsString).value }*.methodAsString
        map(before: new ConstantExpression('beforeOptions' in on), all: list(rest.collect { one(it, true) }))
    }

    Expression one(MethodCallExpression call, boolean wanted) {
        String name = call.methodAsString
        if (!(name in CONDITIONS)) {
            throw new Wrong("when has $name")
        }
        if (name in ['not', 'allOf', 'anyOf']) {
            def inner = callsOf(blockOf(call), name)
            if (inner.empty || (name == 'not' && inner.size() != 1)) {
                throw new Wrong("$name has ${inner.size()} conditions")
            }
            def found = inner.collect { one(it, !wanted) }
            if (name != 'not') { throw new Refused("when has $name") }
            return found[0]
        }
        if (name == 'expression') {
            if (blockOf(call).code.statements.empty) {
                throw new Wrong('expression is empty')
            }
            return list([new ConstantExpression(wanted), blockOf(call)])
        }
        if (name == 'changeRequest' && call.arguments.expressions.empty) {
            return list([new ConstantExpression(wanted), new ConstantExpression('changeRequest')])
        }
        if (name in ['branch', 'tag', 'changeset', 'changelog', 'triggeredBy', 'equals', 'environment'] &&
            call.arguments.expressions.empty) {
            throw new Wrong("$name says nothing")
        }
        throw new Refused("when has $name")
    }

    Expression parameter(MethodCallExpression call) {
        if (!(call.methodAsString in PARAMETERS)) {
            throw new Wrong("parameters has ${call.methodAsString}")
        }
        def entries = named(call, call.methodAsString)
        def keys = entries*.keyExpression*.value
        def known = ['name', 'defaultValue', 'description'] +
            (call.methodAsString == 'choice' ? ['choices'] : []) +
            (call.methodAsString in ['string', 'text'] ? ['trim'] : [])
        if (!('name' in keys)) {
            throw new Wrong("${call.methodAsString} has no name")
        }
        if (keys - known || (call.methodAsString == 'choice') != ('choices' in keys)) {
            throw new Wrong("${call.methodAsString} has ${(keys - known) ? (keys - known).join(', ') : 'no choices'}")
        }
        if (!(call.methodAsString in ['text', 'choice', 'booleanParam', 'string'])) {
            throw new Refused("parameters has ${call.methodAsString}")
        }
        new MapExpression(entries)
    }

    Expression environment(ClosureExpression block) {
        def found = new MapExpression()
        def seen = []
        if (block.code.statements.empty) {
            throw new Wrong('environment is empty')
        }
        block.code.statements.each { statement ->
            def set = statement instanceof ExpressionStatement ? statement.expression : null
            if (!(set instanceof BinaryExpression && set.operation.text == '=' &&
                set.leftExpression instanceof VariableExpression && !(set instanceof DeclarationExpression))) {
                throw new Wrong("environment has ${statement.text}")
            }
            def right = set.rightExpression
            if (!(right instanceof GStringExpression || isText(right) || right instanceof BinaryExpression ||
                (right instanceof MethodCallExpression && right.implicitThis))) {
                throw new Wrong("environment ${set.leftExpression.name} is ${right.text}")
            }
            if (right instanceof MethodCallExpression) { throw new Refused("environment has ${right.methodAsString}") }
            if (!seen.add(set.leftExpression.name) || seen.count(set.leftExpression.name) > 1) {
                throw new Wrong("environment has a second ${set.leftExpression.name}")
            }
            found.addMapEntryExpression(new ConstantExpression(set.leftExpression.name), later(right))
        }
        found
    }

    Expression steps(MethodCallExpression call, String where) {
        def block = blockOf(call)
        checkSteps(block, where)
        block
    }

    static void checkSteps(ClosureExpression block, String where) {
        def calls = callsOf(block, where)
        if (calls.empty) {
            throw new Wrong("$where has nothing")
        }
        calls.each { step(it, where) }
    }

    static void step(MethodCallExpression call, String where) {
        String name = call.methodAsString
        if (!STEPS.containsKey(name) || name in ['stage']) {
            throw new Wrong("$where has $name")
        }
        def given = call.arguments instanceof TupleExpression && !(call.arguments instanceof ArgumentListExpression) ?
            call.arguments.expressions[0] : null
        def plain = given ? [] : call.arguments.expressions.findAll { !(it instanceof MapExpression) }
        def entries = given ? given.mapEntryExpressions :
            call.arguments.expressions.findAll { it instanceof MapExpression }*.mapEntryExpressions.flatten()
        def unknown = entries*.keyExpression*.value - STEPS[name]
        if (unknown) {
            throw new Wrong("$name has ${unknown.join(', ')}")
        }
        if (plain.empty && entries.empty) {
            throw new Wrong("$name says nothing")
        }
        if (plain.size() > STEPS[name].count('') + 1 || (name in ['writeFile'] && plain)) {
            throw new Wrong("$name has ${plain.size()} values without a name")
        }
        def keys = entries*.keyExpression*.value
        if (name == 'writeFile' && !('file' in keys && 'text' in keys)) {
            throw new Wrong("writeFile has no ${'file' in keys ? 'text' : 'file'}")
        }
        if (name == 'archiveArtifacts' && plain.empty && !('artifacts' in keys)) {
            throw new Wrong('archiveArtifacts has no artifacts')
        }
        if (name == 'timeout') {
            timeout(call, true)
        }
        if (name in BLOCKS) {
            if (!(plain && plain[-1] instanceof ClosureExpression)) {
                throw new Wrong("$name has no block")
            }
            if (name != 'script') {
                checkSteps(plain[-1], name)
            }
        } else if (plain.any { it instanceof ClosureExpression }) {
            throw new Wrong("$name has a block")
        }
    }

    static MapExpression sections(ClosureExpression block, String where, List<String> all, Map<String, Closure> known) {
        def found = new MapExpression()
        def calls = callsOf(block, where)
        calls.each {
            if (!(it.methodAsString in all)) { throw new Wrong("$where has ${it.methodAsString}") }
        }
        once(calls*.methodAsString, where)
        calls.each { call ->
            String name = call.methodAsString
            if (!known.containsKey(name)) {
                throw new Refused("$where has $name")
            }
            found.addMapEntryExpression(new ConstantExpression(name), known[name](call))
        }
        found
    }

    static void once(List<String> names, String where) {
        def twice = names.find { names.count(it) > 1 }
        if (twice) {
            throw new Wrong("$where has a second $twice")
        }
    }

    static void require(MapExpression found, String where, List<String> names) {
        def missing = names - found.mapEntryExpressions*.keyExpression*.value
        if (missing) {
            throw new Wrong("$where has no ${missing.join(', ')}")
        }
    }

    static List<MethodCallExpression> callsOf(ClosureExpression block, String where) {
        block.code.statements.findAll { !(it instanceof EmptyStatement) }.collect { callOf(it, where) }
    }

    static MethodCallExpression callOf(Statement statement, String where) {
        def found = statement instanceof ExpressionStatement || statement instanceof ReturnStatement ?
            statement.expression : null
        if (!(found instanceof MethodCallExpression && found.implicitThis)) {
            throw new Wrong("$where has ${statement.text}")
        }
        found
    }

    static ClosureExpression blockOf(MethodCallExpression call) {
        def last = call.arguments.expressions ? call.arguments.expressions[-1] : null
        if (!(last instanceof ClosureExpression)) {
            throw new Wrong("${call.methodAsString} has no block")
        }
        last
    }

    /** The one value of `name value`. */
    static Expression single(MethodCallExpression call, String where) {
        def given = call.arguments.expressions
        if (given.size() != 1 || given[0] instanceof ClosureExpression || given[0] instanceof MapExpression) {
            throw new Wrong("$where is not one value")
        }
        given[0]
    }

    static List<MapEntryExpression> named(MethodCallExpression call, String where) {
        def first = call.arguments.expressions ? call.arguments.expressions[0] : null
        if (!(first instanceof MapExpression)) {
            throw new Wrong("$where has values without names")
        }
        new ArrayList(first.mapEntryExpressions)
    }

    static ClosureExpression later(Expression value) {
        def found = new ClosureExpression([] as org.codehaus.groovy.ast.Parameter[],
            new BlockStatement([new ReturnStatement(value)] as Statement[], new VariableScope()))
        found.variableScope = new VariableScope()
        found
    }

    static boolean isText(Expression value) { value instanceof ConstantExpression && value.value instanceof String }

    static MapExpression map(Map<String, Expression> entries) {
        def found = new MapExpression()
        entries.each { key, value -> found.addMapEntryExpression(new ConstantExpression(key), value) }
        found
    }

    static ListExpression list(List<Expression> items) { new ListExpression(items) }
}
