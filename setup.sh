#!/bin/sh
# Make .venv ready: `sh setup.sh`, or `make setup`. Does nothing when there is nothing to do, and goes on where it
# was broken off. Reads from the environment:
#   PYTHON=python3.12      the interpreter to build on (else the first of 3.13 .. 3.11 that will do)
#   WHEELHOUSE=DIR         install from the wheels in DIR alone, with no network
#   TORCH=cuda             fetch torch with its CUDA libraries; without it, only a CPU build is ever downloaded
#   TORCH_INDEX=URL        where to look for a CPU build that pip does not find by itself
set -eu

cd "$(dirname "$0")"
here=$(pwd -P)
venv=$here/.venv
stamps=$venv/.setup
quiet=-qq
[ ! -t 1 ] || quiet='' # a person sees pip's progress
export PIP_DISABLE_PIP_VERSION_CHECK=1
kernels=runtime/sllm_runtime/worker/engine/ours/kernels
extras=server,worker,dev
# What all of it takes, measured with CPython 3.11 on Linux x86-64, in MB.
torch_mb=190 rest_mb=350 disk_mb=2700 memory_mb=1500

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

apt_line() {
    if [ "$(id -u)" = 0 ]; then echo "apt-get install -y $*"; else echo "sudo apt-get install -y $*"; fi
}

digest() { cat "$@" | cksum | tr -d ' \n'; }

done_with() { # STEP KEY
    [ -r "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]
}

stamp() { # STEP KEY
    mkdir -p "$stamps"
    printf '%s\n' "$2" >"$stamps/$1.new"
    mv "$stamps/$1.new" "$stamps/$1"
}

# Prints "ok", or "version", "venv" for what is wanting. A shim may stand in PATH for an interpreter that is not there.
judge_python() {
    "$1" -c '
import sys
if not (3, 11) <= sys.version_info[:2] < (3, 14): print("version"); sys.exit()
try: import ensurepip, venv
except ImportError: print("venv")
else: print("ok")' 2>/dev/null || echo absent
}

has_torch() {
    "$1" -c 'import importlib.metadata as m; v = m.version("torch").split("."); assert (int(v[0]), int(v[1])) >= (2, 11)' \
        2>/dev/null
}

find_python() { # sets python, or missing
    python='' missing=''
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        command -v "$candidate" >/dev/null 2>&1 || continue
        case $(judge_python "$candidate") in
        ok)
            # An interpreter that brings its own torch saves the download.
            if has_torch "$candidate"; then python=$candidate; return; fi
            [ -n "$python" ] || python=$candidate ;;
        venv) missing="$missing $(basename "$candidate")-venv" ;;
        esac
    done
    [ -z "$python" ] || { missing=''; return; }
    case " $missing " in
    *' python3-venv '*) missing=python3-venv ;;
    '  ') missing='python3 python3-venv' ;;
    *) missing=${missing# } missing=${missing%% *} ;;
    esac
}

free_mb() { df -Pm "$here" | awk 'NR == 2 { print $4 }'; }

memory_free_mb() { awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo 2>/dev/null || true; }

# Before 3.13 Python reads the file that says where our packages lie (UTF-8) in the locale's encoding, at every start.
path_is_readable() {
    "$python" -c '
import locale, os, sys
path = os.fsencode(sys.argv[1])
assert sys.version_info >= (3, 13) or path.decode(locale.getencoding()) == path.decode()' "$here" 2>/dev/null
}

announce() {
    lacking=$missing
    command -v make >/dev/null 2>&1 || lacking="make $lacking"
    if [ -n "$lacking" ]; then
        say "missing: $lacking"
        # shellcheck disable=SC2086 # several package names
        say "    $(apt_line $lacking)"
    fi
    disk=$(free_mb) memory=$(memory_free_mb)
    say "free: disk $disk MB (about $disk_mb needed), memory ${memory:-unknown} MB (about $memory_mb needed)"
    if [ -n "$missing" ]; then
        fail "no Python 3.11, 3.12 or 3.13 with venv was found${PYTHON:+ as PYTHON=$PYTHON}; install it and run this again"
    fi
    path_is_readable ||
        fail "$here has letters that Python cannot read in this locale: export LC_ALL=C.UTF-8, or use another folder"
    if [ -n "${WHEELHOUSE:-}" ]; then
        say "will download nothing: everything is taken from WHEELHOUSE=$WHEELHOUSE"
    else
        say "will download what is not there yet: torch (about $torch_mb MB), Python packages (about $rest_mb MB)"
    fi
    [ "$disk" -ge "$disk_mb" ] || fail "too little disk under $here: $disk MB free, $disk_mb MB needed"
    [ "${memory:-$memory_mb}" -ge "$memory_mb" ] || say "memory is short: the demo and the tests may be killed for it"
}

# The .venv there is stays, unless it is broken or PYTHON asks for another version.
venv_will_do() {
    [ "$(judge_python "$venv/bin/python")" = ok ] || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version_of "$venv/bin/python")" = "$(version_of "$PYTHON")" ]
}

version_of() { "$1" -c 'import sys; print(*sys.version_info[:3])' 2>/dev/null; }

# A package without its RECORD was being written when an earlier set-up was killed: pip would take it for whole.
drop_half_installed() {
    for info in "$venv"/lib/python*/site-packages/*.dist-info; do
        [ ! -d "$info" ] || [ -f "$info/RECORD" ] || rm -rf "$info"
    done
}

pip() {
    if [ -n "${WHEELHOUSE:-}" ]; then set -- "$@" --no-index --find-links "$WHEELHOUSE"; fi
    "$venv/bin/python" -m pip "$@"
}

make_venv() {
    if venv_will_do && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        say "environment: keeping .venv, Python $("$venv/bin/python" -V | cut -d' ' -f2)"
    elif has_torch "$python"; then
        say "environment: .venv on $python, with its installed packages, since torch is among them"
        "$python" -m venv --clear --system-site-packages "$venv"
    else
        say "environment: .venv on $python"
        "$python" -m venv --clear "$venv"
    fi
    # An old pip fetches whole wheels just to look at them. Where the pinned one cannot be had, the bundled one does.
    pip install -qq "$(sed -n '/^pip==/p' constraints.txt)" 2>/dev/null ||
        say "environment: the pinned pip is not to be had, going on with the bundled one"
    stamp venv "$venv_key"
}

install_torch() {
    "$venv/bin/python" tools/install_torch.py --requirement "$(sed -n '/^torch==/p' constraints.txt)"
    stamp torch "$torch_key"
}

install_packages() {
    # The torch that was chosen stays, whatever its version.
    chosen=$("$venv/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))')
    { sed '/^torch==/d' constraints.txt && echo "torch==$chosen"; } >"$stamps/constraints.txt"
    say "packages: sllm[$extras] and what it needs"
    # shellcheck disable=SC2086 # $quiet may be nothing
    pip install $quiet -c "$stamps/constraints.txt" hatchling editables
    # shellcheck disable=SC2086
    pip install $quiet -c "$stamps/constraints.txt" --no-build-isolation -e ".[$extras]"
    "$venv/bin/python" -c 'import sllm, sllm_runtime, sllm_gateway, sllm_invoker, sllm_loaderd'
    stamp packages "$packages_key"
}

# The engine's, for this processor: whoever found none would compile them at a start.
compile_kernels() {
    if [ -d "$kernels" ]; then "$venv/bin/python" -m sllm_runtime.worker.engine.ours.kernels; fi
    stamp kernels "$kernels_key"
}

keys() {
    [ "${TORCH:-cpu}" = cpu ] || extras=$extras,cuda
    venv_key=$here
    torch_key="$venv_key ${TORCH:-cpu} $(sed -n '/^torch==/p' constraints.txt) $(digest tools/install_torch.py)"
    packages_key="$torch_key $extras $(digest pyproject.toml constraints.txt)"
    kernels_key="$packages_key $(digest "$kernels"/*.py 2>/dev/null || true)"
}

venv_stands() {
    [ -x "$venv/bin/python" ] && done_with venv "$venv_key" && { [ -z "${PYTHON:-}" ] || venv_will_do; }
}

all_done() {
    venv_stands && done_with torch "$torch_key" &&
        done_with packages "$packages_key" && done_with kernels "$kernels_key"
}

lock() { # One set-up at a time in this folder; the lock goes with the process.
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>"$here/.setup.lock"
    flock -n 9 || { say "waiting for another set-up in $here"; flock -w 3600 9 || fail "it did not end within an hour"; }
}

keys
if all_done; then
    say "nothing to do"
    exit 0
fi
find_python
announce
lock
venv_stands || make_venv
drop_half_installed
done_with torch "$torch_key" || install_torch
done_with packages "$packages_key" || install_packages
compile_kernels
say "ready"
