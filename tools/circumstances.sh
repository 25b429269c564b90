#!/usr/bin/env bash
# Whether `make demo` and `make test` pass in a fresh clone, whatever the user's shell brings.
#
#   tools/circumstances.sh [-c NAMES] [-e ENVIRONMENT] [-k] [-- PYTEST ARGUMENT ...]
#
# Prints a line a circumstance: passed or failed. The clone is of the last commit.
#   -c NAMES        only these circumstances, separated by commas
#   -e ENVIRONMENT  a ready .venv of this version, which each clone gets by hard links; without it each
#                   clone installs its own, which takes minutes
#   -k              keep the clones and logs; those of a failure are always kept
# Arguments for pytest choose tests: tools/circumstances.sh -e .venv -- -m 'not slow'
set -uo pipefail

ALL=plain,activated,empty-home,no-home,read-only-home,C,cp1252,Kiritimati,umask-002,umask-077
ALL+=,proxies,blank,busy
chosen=$ALL ready='' keep=''
while getopts c:e:k option; do
    case $option in
        c) chosen=$OPTARG ;;
        e) ready=$(realpath "$OPTARG") || exit 2 ;;
        k) keep=yes ;;
        *) exit 2 ;;
    esac
done
shift $((OPTIND - 1))
export PYTEST_ADDOPTS=${*@Q} PIP_CACHE_DIR=${PIP_CACHE_DIR:-$(python3 -m pip cache dir)}
unset VIRTUAL_ENV FEDBN_DATA
repository=$(git -C "$(dirname "$0")" rev-parse --show-toplevel)
PATH=$(tr : '\n' <<<"$PATH" | grep -vxF "$repository/.venv/bin" | paste -sd:)
work=$(mktemp -d)

link_environment() {
    cp -al "$ready" .venv
    {
        grep -rlIF --exclude-dir=__pycache__ --include=__editable__* --include=direct_url.json \
            --include=pyvenv.cfg "${ready%/*}" .venv
        grep -lIF "${ready%/*}" .venv/bin/*
    } | xargs sed -i "s#${ready%/*}#$PWD#g"
    rm -f .venv/lib/python*/site-packages/__pycache__/__editable__*
    touch .venv/.ready
}

bring_about() {
    case $1 in
        activated) source .venv/bin/activate ;;
        empty-home) mkdir ../home && export HOME=$PWD/../home ;;
        no-home) export HOME= ;;
        read-only-home) export HOME=/proc ;;
        C) export LANG=C LC_ALL=C ;;
        cp1252) export PYTHONIOENCODING=cp1252 ;;
        Kiritimati) export TZ=Pacific/Kiritimati ;;
        proxies)
            for name in http https grpc all; do
                export ${name}_proxy=http://127.0.0.1:9 ${name^^}_PROXY=http://127.0.0.1:9
            done
            ;;
        busy)
            for _ in 1 2; do
                (while [ -d "$work" ]; do :; done) &
                busy+=" $!"
            done
            ;;
    esac
}

try() (
    name=$1 busy='' folder="$work/$1/fedbn"
    trap '[ -z "$busy" ] || kill $busy' EXIT
    if [ "$name" = blank ]; then folder="$work/$1/a folder/fedbn"; fi
    if [[ $name = umask-* ]]; then umask "${name#umask-}"; fi
    git clone --quiet "$repository" "$folder" && cd "$folder" || exit
    echo "== install"
    if [ -n "$ready" ] && [ "$name" != blank ]; then link_environment || exit; fi
    if [ "$name" = activated ] || [ "$name" = proxies ]; then make install || exit; fi
    bring_about "$name"
    echo "== demo"
    if [ "$name" = blank ]; then
        make demo 2>&1 | tee demo.log
        grep -q "move the clone to a folder without a blank" demo.log || exit
    else
        make demo || exit
    fi
    echo "== test" && make test
)

failures=0
for name in ${chosen//,/ }; do
    mkdir "$work/$name" && started=$SECONDS
    if [[ ,$ALL, != *,$name,* ]]; then
        echo "no circumstance is called '$name'; there are ${ALL//,/, }" >&2
        exit 2
    elif try "$name" >"$work/$name/log" 2>&1; then
        echo "passed  $name ($((SECONDS - started)) s): $(tail -n 1 "$work/$name/log")"
        if [ -z "$keep" ]; then rm -rf "${work:?}/$name"; fi
    else
        echo "FAILED  $name in $(grep '^== ' "$work/$name/log" | tail -n 1), see $work/$name/log"
        failures=$((failures + 1))
    fi
done
if [ -z "$keep" ]; then rmdir "$work" 2>/dev/null; fi
exit $((failures > 0))
