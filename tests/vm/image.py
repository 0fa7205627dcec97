"""The guest's image, from Debian packages alone: kernel, initramfs with the few modules it needs, read-only root.

Kept outside the checkout, under a name that follows from this file and the suite; built in a folder beside it and
renamed when whole. Needs no KVM and no network once built. The scripts that run inside come by 9p, so that changing
them does not build the image again.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUITE = "trixie"
PACKAGES = ("busybox-static", "mount", "python3", "xfsprogs")
MODULES = (
    "crc32c_generic", "crc32c-intel", "virtio_pci", "virtio_blk", "erofs", "9pnet_virtio", "9p", "nvme", "loop", "xfs",
)  # fmt: skip
HOST_TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "mmdebstrap": "mmdebstrap",
    "mkfs.erofs": "erofs-utils",
    "zstd": "zstd",
}
"""Command -> Debian package that brings it."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
DROPPED_PATHS = ("doc", "man", "locale", "i18n", "info", "zoneinfo", "bash-completion", "zsh", "icons")


class NoGuest(Exception):
    """This machine cannot run or build the guest; the text says what it lacks and how to get it."""


@dataclass(frozen=True, slots=True)
class Image:
    """A built guest."""

    kernel: Path
    initrd: Path
    root: Path
    kernel_release: str


def missing_tools() -> str:
    """What this machine lacks, in one line; empty when it can build and run the guest."""
    missing = {tool: package for tool, package in HOST_TOOLS.items() if not shutil.which(tool)}
    if missing:
        return f"{', '.join(missing)} missing (apt-get install --no-install-recommends {' '.join(missing.values())})"
    return "" if KEYRING.exists() else f"{KEYRING} missing (apt-get install debian-archive-keyring)"


def image_name() -> str:
    """Folder name of the image that this file builds."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update((Path(__file__).parent / "inside" / "early-init").read_bytes())
    return f"{SUITE}-{digest.hexdigest()[:16]}"


def get_image(cache: Path) -> Image:
    """The image, from the cache or built now (about 40 s, 70 MB fetched).

    Raises:
        NoGuest: A tool is missing, or the packages could not be fetched.
    """
    folder = cache / image_name()
    if not folder.exists():
        lacks = missing_tools()
        if lacks:
            raise NoGuest(lacks)
        cache.mkdir(parents=True, exist_ok=True)
        print(f"guest image: building {folder} (once)", file=sys.stderr, flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        try:
            build(scratch)
            (scratch / "image").rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return Image(folder / "vmlinux", folder / "initrd", folder / "root.erofs", (folder / "release").read_text().strip())


def build(scratch: Path) -> None:
    """Fill scratch/image."""
    image, tree, kernel = scratch / "image", scratch / "tree", scratch / "kernel"
    for folder in (image, tree, kernel):
        folder.mkdir()
    bootstrap(tree.with_suffix(".tar"), kernel)
    run("tar", "-C", str(tree), "-xf", str(tree.with_suffix(".tar")), "--exclude=./dev/*")
    run("mkfs.erofs", "-Eforce-inode-compact", "-T0", str(image / "root.erofs"), str(tree))
    run("dpkg-deb", "-x", str(next(kernel.glob("linux-image-*.deb"))), str(kernel))
    packed = next((kernel / "boot").glob("vmlinuz-*"))
    release = packed.name.removeprefix("vmlinuz-")
    (image / "release").write_text(release + "\n")
    (image / "vmlinux").write_bytes(unpack_kernel(packed.read_bytes()))
    busybox = next(path for path in (tree / "usr/bin/busybox", tree / "bin/busybox") if path.exists())
    modules = next(path for path in kernel.rglob(release) if path.parent.name == "modules")
    (image / "initrd").write_bytes(initramfs(busybox.read_bytes(), pick_modules(modules)))


def bootstrap(tar: Path, kernel: Path) -> None:
    """Root file system into ``tar``; the suite's newest kernel package, fetched but not installed, into ``kernel``."""
    sites = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages").split()
    mirror = os.environ.get("MIRROR") or next(
        (site for site in sites if "debian" in site), "http://deb.debian.org/debian"
    )
    fetch_kernel = (
        f'cd {kernel} && export APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" && apt-get -qq -o APT::Sandbox::User= download '
        "$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \\(linux-image-[^ ]*\\)/\\1/p' | head -1)"
    )
    unneeded = ("usr/share/perl*", "usr/lib/*/perl*", "usr/lib/*/gconv", "usr/lib/python3*/test", "var/lib/apt/lists/*")
    trim = "rm -rf " + " ".join(f'"$1"/{path}' for path in unneeded)
    folders = 'mkdir -p "$1"/src "$1"/out "$1"/mnt'
    # The image's times are 0 (reproducible), so .pyc files are believed unchecked: each start of Python takes 2 s less.
    compile_all = "python3 -m compileall -q -f --invalidation-mode unchecked-hash /usr/lib/python3*"
    compile_inside = f'chroot "$1" sh -c "{compile_all}" >/dev/null'
    run(
        "mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(PACKAGES)}",
        *(f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in DROPPED_PATHS),
        '--aptopt=APT::Install-Recommends "false"', '--aptopt=Acquire::Languages "none"',
        *(f"--customize-hook={hook}" for hook in (fetch_kernel, trim, folders, compile_inside)),
        SUITE, str(tar), f"deb [signed-by={KEYRING}] {mirror} {SUITE} main",
    )  # fmt: skip


def unpack_kernel(packed: bytes) -> bytes:
    """The ELF kernel inside a bzImage: QEMU enters it directly, which saves the slow unpacking in emulation.

    Where the payload lies: Documentation/arch/x86/boot.rst, setup_sects, payload_offset, payload_length.
    """
    setup_sectors = packed[0x1F1] or 4
    offset, length = struct.unpack_from("<II", packed, 0x248)
    start = (setup_sectors + 1) * 512 + offset
    payload = packed[start : start + length]
    if payload[:6] == b"\xfd7zXZ\x00":
        elf = lzma.LZMADecompressor().decompress(payload)
    elif payload[:4] == b"\x28\xb5\x2f\xfd":
        elf = subprocess.run(["zstd", "-dcq"], input=payload[:-4], stdout=subprocess.PIPE, check=True).stdout
    elif payload[:2] == b"\x1f\x8b":
        elf = gzip.decompress(payload[:-4])
    else:
        raise NoGuest(f"kernel payload of an unknown kind: {payload[:6].hex()}")
    assert elf[:4] == b"\x7fELF"
    return elf


def pick_modules(folder: Path) -> list[tuple[str, bytes]]:
    """(file name, unpacked bytes) of MODULES and all that they depend on, in the order to load them."""
    files = {path.name.split(".ko")[0].replace("-", "_"): path for path in folder.rglob("*.ko*")}
    picked: dict[str, bytes] = {}

    def add(name: str) -> None:
        name = name.replace("-", "_")
        if name in picked or name not in files:  # not a module: built into this kernel
            return
        path = files[name]
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        for field in re.findall(rb"\0(?:depends=|softdep=pre: )([^\0]+)", content):
            for dependency in re.split(r"[, ]+", field.decode()):
                add(dependency)
        picked[name] = content

    for name in MODULES:
        add(name)
    return [(f"{name}.ko", content) for name, content in picked.items()]


def initramfs(busybox: bytes, modules: list[tuple[str, bytes]]) -> bytes:
    """A cpio archive: busybox, the modules with their order, early-init as /init."""
    early = (Path(__file__).parent / "inside" / "early-init").read_bytes()
    order = "".join(f"{name}\n" for name, _ in modules).encode()
    folders = [(name, 0o40755, b"") for name in ("bin", "dev", "proc", "sys", "newroot", "modules")]
    files = [("init", 0o100755, early), ("bin/busybox", 0o100755, busybox), ("modules/order", 0o100644, order)]
    files += [(f"modules/{name}", 0o100644, content) for name, content in modules]
    return b"".join(cpio_entries([*folders, *files, ("TRAILER!!!", 0, b"")]))


def cpio_entries(members: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    """Members of an archive in the "newc" format: Documentation/driver-api/early-userspace/buffer-format.rst."""
    for number, (name, mode, content) in enumerate(members, 1):
        fields = (number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
        yield head + bytes(-len(head) % 4) + content + bytes(-len(content) % 4)


def run(*command: str) -> str:
    """Output of a command; NoGuest with the end of its errors when it fails."""
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NoGuest(f"{command[0]} failed: {' '.join(done.stderr.split())[-800:]}")
    return done.stdout
