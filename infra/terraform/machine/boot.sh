#!/usr/bin/env bash
# Make this machine one of the cluster, at each boot, by the stages of its kind. Each may run again: what it has done it
# finds done. The first that fails ends the boot, is named in the log, and the machine's group is told.
set -Eeuo pipefail
umask 077
settings=${1:-/etc/sllm/boot.env}
here=$(dirname "$0")
# shellcheck source=/dev/null
. "$settings"
# shellcheck source=/dev/null
. "$here/cloud.sh"
# What this kind of machine does beside account and software.
# shellcheck source=/dev/null
. "$here/stages.sh"

# Where Amazon's images with torch keep it.
readonly IMAGE_PYTHON=${IMAGE_PYTHON:-/opt/pytorch/bin/python3}

say() { printf 'sllm-boot: %s\n' "$*"; }

uptime_s() { cut -d ' ' -f 1 /proc/uptime; }

stage='' reported=''
failed() { # STATUS LINE
    [ "$BASHPID" = "$$" ] && [ -z "$reported" ] || return 0
    reported=yes
    say "stage $stage FAILED with status $1 at line $2; this machine does not join" >&2
    cloud_failed || say 'its group was not told' >&2
}
trap 'failed $? $LINENO' ERR

run() { # STAGE
    local began
    stage=$1 began=$(uptime_s)
    "$stage"
    say "stage $stage done: $began to $(uptime_s) s after boot"
}

# What the image lacks. From Amazon's own repositories, which the S3 endpoint reaches.
packages() {
    # shellcheck disable=SC2086 # one word for each package
    rpm --query --quiet $PACKAGES || dnf install --assumeyes --quiet $PACKAGES
}

# The daemons are not root: what they may read, functions may.
account() {
    id "$ACCOUNT" >/dev/null 2>&1 || useradd --system --home-dir "$MOUNT" --shell /usr/sbin/nologin "$ACCOUNT"
}

# One environment for each artifact; `current` changes in one step.
software() {
    local target=$PREFIX/$ARTIFACT_SHA256 work
    if [ ! -e "$target/.done" ]; then
        rm -rf "$target"
        mkdir -p "$PREFIX"
        chmod 755 "$PREFIX"
        work=$PREFIX/.new
        rm -rf "$work"
        mkdir "$work"
        cloud_fetch "$ARTIFACT_URL" "$work/artifact.tar.gz"
        printf '%s  %s\n' "$ARTIFACT_SHA256" "$work/artifact.tar.gz" | sha256sum --check --quiet --strict
        mkdir "$work/wheels"
        tar --extract --no-same-owner --file "$work/artifact.tar.gz" --directory "$work/wheels"
        (umask 022; install_wheels "$target" "$work/wheels")
        rm -rf "$work"
        touch "$target/.done"
    fi
    ln -sfn "$target" "$PREFIX/current.new"
    mv -T "$PREFIX/current.new" "$PREFIX/current"
}

install_wheels() { # TARGET WHEELS: no network, no package that the archive does not hold; torch may be the image's
    local pip wheel base beside='' site
    pip=$(only "$2"/pip-*.whl) wheel=$(only "$2"/sllm-*.whl)
    case ,$EXTRAS, in *,worker,*) compgen -G "$2/torch-*.whl" >/dev/null || beside=torch ;; esac
    base=$(python "$2" $beside)
    "$base" -m venv --without-pip "$1"
    if [ -n "$beside" ]; then
        site=$("$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        torch_of "$base" >"$site/image.pth"
    fi
    PYTHONPATH=$pip "$1/bin/python" -m pip install --quiet --no-index --find-links "$2" --no-cache-dir \
        "sllm[$EXTRAS] @ file://$wheel"
    case ,$EXTRAS, in *,worker,*)
        "$1/bin/python" -m sllm_runtime.worker.engine.ours.kernels ||
            say "the engine's kernels were not compiled: each process that computes will do it" >&2 ;;
    esac
}

python() { # WHEELS [torch]: the first interpreter that the wheels are for, or that has torch
    local each wheels=$1
    shift
    for each in ${1:+"$IMAGE_PYTHON"} python3.13 python3.12 python3.11; do
        # Those that are compiled say for which: no other can use them.
        case $each in python3.*)
            if compgen -G "$wheels/*-cp3[0-9][0-9]-cp3[0-9][0-9]-*.whl" >/dev/null &&
                ! compgen -G "$wheels/*-cp3${each#python3.}-cp3${each#python3.}-*.whl" >/dev/null; then continue; fi ;;
        esac
        each=$(command -v "$each") || continue
        if [ $# = 0 ] || torch_of "$each" >/dev/null; then
            printf '%s\n' "$each"
            return
        fi
    done
    say "there is no Python 3.11 to 3.13${1:+ with $1, which the artifact lacks}" >&2
    return 1
}

torch_of() { # PYTHON: the folder that its torch lies in; fails where it has none
    "$1" -c 'from importlib.metadata import distribution as found; print(found("torch").locate_file(""))' 2>/dev/null
}

only() { # FILES: the one of them
    if [ "$#" != 1 ] || [ ! -e "$1" ]; then
        say "the artifact holds not one file like $1" >&2
        return 1
    fi
    printf '%s\n' "$1"
}

put() { # FILE [OWNER]: stdin becomes it in one step, for OWNER's eyes only: the daemons', if none is named
    cat >"$1.new"
    chown "${2:-$ACCOUNT}" "$1.new"
    chmod 400 "$1.new"
    mv "$1.new" "$1"
}

mkdir -p "$RUN"
for each in $STAGES; do run "$each"; done
say "done $(uptime_s) s after boot"
