// Prints one JSON document: for each file named on standard input, its compilation error, or what it is made
// of: `tree`, the calls in it by name, and `strings`, the constant text of each argument, as base64.
import groovy.json.JsonOutput
import org.codehaus.groovy.ast.ASTNode
import org.codehaus.groovy.ast.CodeVisitorSupport
import org.codehaus.groovy.ast.expr.BinaryExpression
import org.codehaus.groovy.ast.expr.ConstantExpression
import org.codehaus.groovy.ast.expr.GStringExpression
import org.codehaus.groovy.ast.expr.MethodCallExpression
import org.codehaus.groovy.control.CompilationFailedException
import org.codehaus.groovy.control.CompilationUnit
import org.codehaus.groovy.control.CompilerConfiguration
import org.codehaus.groovy.control.Phases

class Describe extends CodeVisitorSupport {
    List<String> tree = []
    List<String> strings = []
    int depth = 0

    void visitMethodCallExpression(MethodCallExpression call) {
        tree << ('  ' * depth) + call.methodAsString
        depth++
        call.arguments.visit(this)
        depth--
    }

    void visitBinaryExpression(BinaryExpression expression) {
        String text = folded(expression)
        if (text == null) {
            super.visitBinaryExpression(expression)
        } else {
            keep(text)
        }
    }

    void visitConstantExpression(ConstantExpression expression) {
        if (expression.value instanceof String) {
            keep(expression.value)
        }
    }

    void visitGStringExpression(GStringExpression expression) {
        tree << ('  ' * depth) + 'GString ' + expression.text
    }

    private void keep(String text) {
        strings << text.getBytes('UTF-8').encodeBase64().toString()
    }

    private static String folded(ASTNode node) {
        if (node instanceof ConstantExpression && node.value instanceof String) {
            return node.value
        }
        if (node instanceof BinaryExpression && node.operation.text == '+') {
            String left = folded(node.leftExpression)
            String right = folded(node.rightExpression)
            return left == null || right == null ? null : left + right
        }
        return null
    }
}

def found = [:]
System.in.readLines('UTF-8').each { name ->
    def configuration = new CompilerConfiguration(sourceEncoding: 'UTF-8')
    def unit = new CompilationUnit(configuration)
    def source = unit.addSource(new File(name))
    try {
        unit.compile(Phases.CLASS_GENERATION)
        // the visited tree is of the source as it was parsed, before later phases rewrite it
        def parsed = new CompilationUnit(configuration)
        def fresh = parsed.addSource(new File(name))
        parsed.compile(Phases.CONVERSION)
        def visitor = new Describe()
        fresh.AST.statementBlock.visit(visitor)
        found[name] = [tree: visitor.tree, strings: visitor.strings]
    } catch (CompilationFailedException error) {
        found[name] = [error: error.message]
    }
}
println JsonOutput.toJson(found)
