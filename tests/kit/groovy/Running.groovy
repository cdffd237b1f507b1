// The build under way: its agents, its clock, its processes.
import com.cloudbees.groovy.cps.Continuation
import com.cloudbees.groovy.cps.impl.CpsCallableInvocation
import java.nio.file.FileSystems
import java.util.concurrent.TimeUnit

class Running {
    static final long PARALLEL_SECONDS = 600
    static File root
    static File workspace
    static File repository
    static File abort
    static Map environment
    static Map parameters
    static Map timeouts
    static String answer
    static boolean inPost = false
    static boolean failFast = false
    static boolean unstable = false
    static final List stages = Collections.synchronizedList([])
    static final List events = Collections.synchronizedList([])
    static final ThreadLocal<Map> added = new InheritableThreadLocal<Map>()
    /** The stage around. */
    static final ThreadLocal<List> around = new InheritableThreadLocal<List>()
    /** Whether there is an agent. */
    static final ThreadLocal<Boolean> onAgent = new InheritableThreadLocal<Boolean>()
    /** When the timeouts around pass. */
    static final ThreadLocal<List<Long>> deadlines = new InheritableThreadLocal<List<Long>>()
    /** Of the parallel around: empty until a branch of it has failed. */
    static final ThreadLocal<List> stopped = new InheritableThreadLocal<List>()

    static void prepare(Map asked) {
        workspace = new File(asked.workspace)
        root = workspace.parentFile
        repository = asked.repository ? new File(asked.repository) : null
        abort = new File(asked.abort)
        environment = asked.environment
        timeouts = asked.timeouts ?: [:]
        answer = asked.input
    }

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

    static void say(String text) { new File(root, 'log') << text + '\n' }

    static File here() {
        if (!onAgent.get()) {
            throw new RuntimeException('Required context class hudson.FilePath is missing: no agent is here')
        }
        workspace
    }

    /** A fresh one, as a pod is. One at a time: our files need no more. */
    static Object node(String label, boolean checkout, Closure body) {
        def before = onAgent.get()
        events << "agent $label".toString()
        onAgent.set(true)
        if (repository) {
            workspace.deleteDir()
            workspace.mkdirs()
            if (checkout) { Running.checkout() }
        }
        try {
            return body()
        } finally {
            onAgent.set(before)
            events << "released $label".toString()
        }
    }

    static void checkout() {
        here()
        if (['cp', '-a', "$repository/.".toString(), workspace.path].execute().waitFor()) {
            throw new RuntimeException('checkout failed')
        }
    }

    static void options(String stage, List options, Closure body) {
        def before = deadlines.get()
        options.each {
            if (it.option == 'lock') { events << "lock ${it.resource}".toString() }
            if (it.option == 'timeout' && timeouts[stage] != null) {
                long passes = System.nanoTime() + (long) (timeouts[stage] * 1e9)
                deadlines.set((before ?: []) + passes)
            }
        }
        try {
            body()
        } finally {
            deadlines.set(before)
            options.findAll { it.option == 'lock' }.each { events << "unlock ${it.resource}".toString() }
        }
    }

    static void input(String message) {
        events << "input ${onAgent.get() ? 'on an agent' : 'without an agent'}".toString()
        while (answer == null) {
            if (isStopped()) { throw new Aborted('nobody answered') }
            Thread.sleep(50)
        }
        if (answer != 'approve') { throw new Aborted('rejected') }
    }

    static List<File> matching(String pattern) {
        def base = here().toPath()
        def matcher = FileSystems.default.getPathMatcher("glob:${pattern.trim()}")
        def found = []
        base.toFile().eachFileRecurse(groovy.io.FileType.FILES) {
            if (matcher.matches(base.relativize(it.toPath()))) { found << it }
        }
        found.sort()
    }

    static void stage(String name, Closure body) {
        def entry = [name, 'SUCCESS']
        def before = around.get()
        stages << entry
        around.set(entry)
        try {
            body()
        } catch (Throwable error) {
            entry[1] = error instanceof Aborted ? 'ABORTED' : 'FAILURE'
            throw error
        } finally {
            around.set(before)
        }
    }

    /** Of the step only what ours asks for: the build's result stays, an abort goes on. */
    static void catchError(Map given, Closure body) {
        if (given != [buildResult: 'SUCCESS', stageResult: 'FAILURE', catchInterruptions: false]) {
            throw new RuntimeException("catchError with $given")
        }
        try {
            body()
        } catch (Aborted error) {
            throw error
        } catch (Throwable error) {
            say("caught: $error")
            around.get()[1] = given.stageResult
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
                    if (failFast) { group << name }
                }
            }
        }
        threads.each { it.join(PARALLEL_SECONDS * 1000) }
        if (threads.any { it.alive }) {
            throw new RuntimeException("a branch of parallel did not end within $PARALLEL_SECONDS s")
        }
        if (errors) {
            throw errors.find { !(it instanceof Aborted) } ?: errors[0]
        }
    }

    static void sh(String script) {
        def log = new File(root, 'log')
        def builder = new ProcessBuilder('setsid', '/bin/sh', '-xe', '-c', script).directory(here())
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

    static boolean isStopped() {
        (!inPost && (abort.exists() || stopped.get())) || deadlines.get().any { it < System.nanoTime() }
    }
}
