"""One guest under QEMU: no KVM needed, no network, NVMe drives, a folder in (/src) and a folder out (/out)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from image import Image

BLOCK_BYTES = 4096
"""The drives' logical block: what a power cut keeps or loses as a whole."""
CONSOLE = "console=ttyS0 quiet loglevel=4 panic=-1 tsc=reliable mitigations=off nokaslr audit=0"


class GuestFailed(Exception):
    """The guest did not do its job; the text ends with its console."""


@dataclass(frozen=True, slots=True)
class Drive:
    """An NVMe namespace on a file of the host."""

    path: Path
    write_log: Path | None = None
    """Where each write and flush is logged, in the format of dm-log-writes; None: not logged."""


def qemu_command(
    image: Image, job: str, source: Path, out: Path, drives: Sequence[Drive], memory_mib: int
) -> list[str]:
    """One vCPU: with more, emulated guests die at boot now and then while the kernel patches its text."""
    command = [
        "qemu-system-x86_64", "-M", "q35,usb=off", "-accel", "tcg,tb-size=256", "-cpu", "max",
        "-m", str(memory_mib), "-smp", "1", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-serial", f"file:{out}/console", "-kernel", str(image.kernel), "-initrd", str(image.initrd),
        "-append", f"{CONSOLE} job={job}",
        "-drive", f"if=none,id=root,file={image.root},format=raw,readonly=on,cache=unsafe",
        "-device", "virtio-blk-pci,drive=root",
        "-virtfs", f"local,path={source},mount_tag=src,security_model=none,readonly=on",
        "-virtfs", f"local,path={out},mount_tag=out,security_model=none",
        "-device", "nvme,id=nvme,serial=rewarm,max_ioqpairs=2",
    ]  # fmt: skip
    for number, drive in enumerate(drives, 1):
        # The host's page cache stands for the medium, so the host need not flush.
        command += ["-blockdev", f"driver=file,filename={drive.path},node-name=file{number},cache.no-flush=on"]
        node = f"file{number}"
        if drive.write_log is not None:
            node = f"logged{number}"
            command += ["-blockdev", f"driver=file,filename={drive.write_log},node-name=log{number},cache.no-flush=on"]
            command += ["-blockdev", f"driver=blklogwrites,node-name={node},file=file{number},log=log{number}"]
        blocks = f"logical_block_size={BLOCK_BYTES},physical_block_size={BLOCK_BYTES}"
        command += ["-device", f"nvme-ns,bus=nvme,drive={node},nsid={number},{blocks}"]
    return command


def boot(
    image: Image, job: str, source: Path, out: Path, drives: Sequence[Drive], *,
    cut_when: Callable[[], bool] | None = None, memory_mib: int = 1024, timeout_s: float = 300,
) -> float:  # fmt: skip
    """Run a job in a guest until it powers off, or until ``cut_when`` says to kill it. Returns seconds.

    Raises:
        GuestFailed: The job's exit status was not 0, the guest ended without one, or the time was up.
    """
    (out / "rc").unlink(missing_ok=True)
    began = time.monotonic()
    guest = subprocess.Popen(qemu_command(image, job, source, out, drives, memory_mib), stdin=subprocess.DEVNULL)
    try:
        while guest.poll() is None:
            if cut_when is not None and cut_when():
                return time.monotonic() - began
            if time.monotonic() - began > timeout_s:
                raise GuestFailed(f"job {job} not done after {timeout_s:.0f} s{console(out)}")
            time.sleep(0.05)
    finally:
        if guest.poll() is None:
            guest.kill()
            guest.wait()
    status = (out / "rc").read_text().strip() if (out / "rc").exists() else "none"
    if status != "0" or cut_when is not None:
        raise GuestFailed(f"job {job} ended with status {status}{console(out)}")
    return time.monotonic() - began


def console(out: Path) -> str:
    """The end of what the guest printed."""
    path = out / "console"
    lines = path.read_text(errors="replace").splitlines()[-30:] if path.exists() else []
    return "".join(f"\n  | {line}" for line in lines)
