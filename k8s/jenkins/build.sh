# shellcheck shell=sh
# Sourced by each step of the Jenkinsfile, in the checkout: "$@" becomes what every verb is given, RUN_ID the run
# of this build. POSIX. Parameters are data: they come as environment variables, and no text of theirs is code.
# A first build has no variables for its parameters, so each has its default here as well.
mkdir -p .mlpipe
spec=${PIPELINE:-pipelines/llm.yaml}
if [ -n "${STORE:-}" ]; then
  MLPIPE_STORE=$STORE spec=.mlpipe/asked.yaml
  export MLPIPE_STORE
fi

set --
carriage_return=$(printf '\r')
while IFS= read -r override; do
  override=${override%"$carriage_return"}
  if [ -n "$override" ]; then set -- "$@" --set "$override"; fi
done <<END_OF_OVERRIDES
${OVERRIDES:-}
END_OF_OVERRIDES
if [ "${STRATEGY:-as in the file}" != 'as in the file' ]; then
  set -- "$@" --set "train.strategy=$STRATEGY"
fi
set -- "$@" -- "$spec"

# A repeated stage or a fresh agent finds the run of its build; a job that was made anew does not meet old ones.
if [ -z "${RUN_ID:-}" ]; then
  RUN_ID=build-$BUILD_NUMBER-$(
    { printf '%s\n' "${JENKINS_URL:-}" "$JOB_NAME" "$BUILD_NUMBER" "$BUILD_STARTED" "$@"; cat -- "$spec"; } |
      sha256sum | cut -c 1-10
  )
fi
export RUN_ID

# What `mlpipe submit --to jenkins` left in the store; the pipeline with that digest, or none.
if [ -n "${STORE:-}" ] && [ ! -e "$spec" ]; then
  mlpipe spec --out "$spec" --digest "${SPEC_DIGEST:-none}" -- "$RUN_ID"
fi

phase() {
  phase=$1
  shift
  mlpipe submit --to "${BACKEND:-kubernetes}" --run-id "$RUN_ID" --phase "$phase" --wait "$@"
}

# 2: there is no such run, since the build ended before it had started one
report() {
  mlpipe report --out .mlpipe/report.html -- "$RUN_ID" || test $? -eq 2
  mlpipe report --out .mlpipe/junit.xml -- "$RUN_ID" || test $? -eq 2
}

cancel() {
  mlpipe cancel --timeout 12min -- "$RUN_ID" || test $? -eq 2
}
