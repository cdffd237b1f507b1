// How a build ends that was aborted, denied, or ran out of time.
class Aborted extends RuntimeException {
    Aborted(String message) { super(message) }
}
