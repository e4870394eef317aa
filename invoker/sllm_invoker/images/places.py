"""Where things lie inside our images, and how an image is set up. Pure."""

from __future__ import annotations

from typing import Final

FORMAT: Final = 1
"""Of the images' layout. Raised with any change of it: images of another one are made anew."""

PYTHON_HOME: Final = "opt/python"
"""Interpreter and standard library."""
ENVIRONMENT: Final = "opt/sllm"
"""A virtual environment over it: packages, ours and third parties'."""
USER: Final = 65534
"""``nobody``: owns nothing in an image."""
CONTAINERFILE: Final = "Containerfile"
REPOSITORY: Final = "localhost/sllm"
LABEL: Final = "sllm.image"
"""On every image of ours: what it is (``system``, ``base``, ``function``)."""

ACCOUNTS: Final = {
    "etc/passwd": f"root:x:0:0:root:/:/none\nnobody:x:{USER}:{USER}:nobody:/tmp:/none\n",
    "etc/group": f"root:x:0:\nnogroup:x:{USER}:\n",
    "etc/nsswitch.conf": "hosts: files dns\n",
    "etc/hosts": "127.0.0.1 localhost\n",
    "etc/resolv.conf": "",
}
"""What the C library looks up; engines lay their own over the last two."""
DIRECTORIES: Final = {"tmp": 0o1777, "proc": 0o555, "sys": 0o555, "dev": 0o755, "run": 0o755, "var/tmp": 0o1777}


def packages(minor: str) -> str:
    """Where ``import`` finds packages; ``minor``: Python's, as ``3.11``."""
    return f"{ENVIRONMENT}/lib/python{minor}/site-packages"


def configuration(kind: str, *, library_path: bool) -> tuple[str, ...]:
    """An image's configuration as a Containerfile's instructions. ``library_path``: the interpreter is linked to
    libraries of its own prefix, which it would look for where that prefix was."""
    return (
        f"ENV PATH=/{ENVIRONMENT}/bin:/usr/bin:/bin",
        "ENV HOME=/tmp",
        "ENV LANG=C.UTF-8",
        *((f"ENV LD_LIBRARY_PATH=/{PYTHON_HOME}/lib",) if library_path else ()),
        f"USER {USER}:{USER}",
        "WORKDIR /tmp",
        f"LABEL {LABEL}={kind}",
    )


def reference(kind: str, digest: str) -> str:
    """An image's name on this node: by what is in it. ``digest``: hex."""
    return f"{REPOSITORY}-{kind}:{digest[:32]}"


def over(below: str, archive: str, kind: str) -> str:
    """A Containerfile: the tar file ``archive`` as a layer over the image ``below``, which keeps its configuration."""
    return f"FROM {below}\nADD {archive} /\nLABEL {LABEL}={kind}\n"
