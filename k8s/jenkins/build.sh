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

# What `mlpipe submit --to jenkins` left in the store; the pipeline with that digest, or none: then whatever reads
# the file fails. `cancel` and `report` do not, so that nobody keeps a run going by changing what the store says.
if [ -n "${STORE:-}" ]; then
  mlpipe spec --out "$spec" --digest "${SPEC_DIGEST:-none}" -- "$RUN_ID" || rm -f -- "$spec"
fi

phase() {
  phase=$1
  shift
  mlpipe submit --to "${BACKEND:-kubernetes}" --run-id "$RUN_ID" --phase "$phase" --wait "$@"
}

# Where `phase` puts the run: into the store of the pipeline, overrides applied, unless a variable names another.
# 2: the pipeline is not valid, so that this build has made no run.
find_store() {
  if [ -z "${STORE:-}" ]; then
    MLPIPE_STORE=$(mlpipe validate --print-store "$@") || return
    export MLPIPE_STORE
  fi
}

report() {
  if find_store "$@"; then
    mlpipe report --ignore-not-found --out .mlpipe/report.html -- "$RUN_ID"
    mlpipe report --ignore-not-found --out .mlpipe/junit.xml -- "$RUN_ID"
  else
    test $? -eq 2
  fi
}

cancel() {
  if find_store "$@"; then
    mlpipe cancel --ignore-not-found --timeout 12min -- "$RUN_ID"
  else
    test $? -eq 2
  fi
}
