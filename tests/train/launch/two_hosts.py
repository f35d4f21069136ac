"""Two hosts on this machine, `left` and `right`: namespaces of network, host name and mounts, with a link between them.

Each host is a process that only waits, holds the namespaces, and dies with the test. The kernel removes namespaces and link with
the last process in them, so nothing is left behind, however a test ends. Needs root.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PACKAGES = {"unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux", "ip": "iproute2", "nft": "nftables"}
ADDRESSES = {"left": "10.99.0.1", "right": "10.99.0.2"}
CARD = "link0"
"""Name of the network interface between the hosts, on both of them."""

_WITH_TEST = ("setpriv", "--pdeathsig", "KILL")
_HOLD = 'hostname "$1" && mount --bind "$2" /etc/hosts && ip link set lo up && echo ready && exec sleep infinity'


def why_not() -> str:
    """Returns why this machine cannot make hosts; empty if it can."""
    missing = {name: package for name, package in PACKAGES.items() if shutil.which(name) is None}
    if missing:
        return f"{', '.join(missing)} missing: apt-get install {' '.join(sorted(set(missing.values())))}"
    return "" if os.geteuid() == 0 else "hosts made of network namespaces need root"


@dataclass
class Host:
    """A host, and the processes that were started on it."""

    name: str
    holder: "subprocess.Popen[str]"
    started: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    def run(self, *command: str) -> str:
        """Runs a command on the host and returns its output."""
        return subprocess.run(self._here(command), capture_output=True, text=True, check=True, timeout=30).stdout

    def start(
        self, command: Sequence[str], output: Path, environment: Mapping[str, str], folder: Path
    ) -> "subprocess.Popen[bytes]":
        """Starts a program on the host; it is killed with the host."""
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._here(command, folder),
                stdout=file,
                stderr=file,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def link(self, state: str) -> None:
        """Sets the link `up` or `down`. The address stays."""
        self.run("ip", "link", "set", CARD, state)

    def drop(self, what: str) -> None:
        """Drops incoming packets without a reply, as a firewall does: `tcp dport 30000-65535`."""
        chain = "add chain ip forge input { type filter hook input priority 0; }"
        self.run("nft", f"add table ip forge; {chain}; add rule ip forge input iifname {CARD} {what} drop")

    def close(self) -> None:
        """Kills everything on the host, and the host."""
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        self.holder.kill()
        self.holder.communicate(timeout=30)

    def _here(self, command: Sequence[str], folder: Path = Path("/")) -> list[str]:
        target = [f"--target={self.holder.pid}", "--net", "--uts", "--mount", f"--wd={folder}"]
        return [*_WITH_TEST, "nsenter", *target, *command]


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Makes both hosts for the `with` block."""
    hosts: list[Host] = []
    try:
        hosts.extend(_host(name, folder) for name in ADDRESSES)
        left, right = hosts
        peer = ["peer", "name", CARD, "netns", str(right.holder.pid)]
        subprocess.run(["ip", "link", "add", CARD, "netns", str(left.holder.pid), "type", "veth", *peer], check=True, timeout=30)
        for host in hosts:
            host.run("ip", "address", "add", f"{ADDRESSES[host.name]}/24", "dev", CARD)
            host.link("up")
        yield left, right
    finally:
        for host in hosts:
            host.close()


def _host(name: str, folder: Path) -> Host:
    names = folder / f"hosts-{name}"
    names.write_text("".join(f"{address} {host}\n" for host, address in ADDRESSES.items()) + "127.0.0.1 localhost\n")
    command = [*_WITH_TEST, "unshare", "--net", "--uts", "--mount", "sh", "-c", _HOLD, "sh", name, str(names)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n", f"host {name} was not made"
    return Host(name, holder)
