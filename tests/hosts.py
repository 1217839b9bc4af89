"""Hosts that are network namespaces of this machine, joined by a bridge.

Each has a host name, an address and an /etc/hosts of its own: Gloo binds to what the host name
resolves to. All lie in one user namespace, so that root's rights are not needed outside of it.
Needs unshare, nsenter and hostname (util-linux, hostname) and ip (iproute2).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ADDRESSES = "10.77.0.{}"

# Waits until the cable is plugged in, then becomes the command.
_SET_UP = """
read -r address name hosts
ip link set lo up
ip address add "$address/24" dev eth0
ip link set eth0 up
hostname "$name"
mount --bind "$hosts" /etc/hosts
exec "$@" </dev/null
"""


class Hosts:
    """A number of hosts, as a context manager; `run` starts a program on one of them.

    Args:
      number: how many.
      folder: where their /etc/hosts is written.
    """

    def __init__(self, number: int, folder: Path):
        self.names = [f"host{index}" for index in range(number)]
        self.addresses = [ADDRESSES.format(index + 1) for index in range(number)]
        self._file = folder / "etc-hosts"
        pairs = zip(self.addresses, self.names, strict=True)
        lines = [f"{address} {name}\n" for address, name in pairs]
        self._file.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self._processes: list[subprocess.Popen] = []

    def __enter__(self) -> Hosts:
        command = "echo ready; exec sleep infinity"
        self._switch = subprocess.Popen(
            ["unshare", "--map-root-user", "--net", "--mount", "sh", "-c", command],
            stdout=subprocess.PIPE,
        )
        assert self._switch.stdout
        with self._switch.stdout as output:
            assert output.readline() == b"ready\n", "unshare was refused"
        self._configure("link", "add", "bridge0", "type", "bridge")
        self._configure("link", "set", "bridge0", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._processes, self._switch):
            process.kill()
            process.wait()

    def _inside(self, *command: str) -> list[str]:
        """The command, to be run where the bridge is."""
        target = ["--target", str(self._switch.pid), "--user", "--net", "--mount"]
        return ["nsenter", *target, "--preserve-credentials", *command]

    def _configure(self, *arguments: str) -> None:
        subprocess.run(self._inside("ip", *arguments), check=True)

    def run(self, index: int, command: list[str], **options) -> subprocess.Popen:
        """Starts a command on a host; the process is the command's own."""
        process = subprocess.Popen(
            self._inside(
                "unshare", "--net", "--uts", "--mount", "sh", "-ec", _SET_UP, "-", *command
            ),
            stdin=subprocess.PIPE,
            **options,
        )
        self._processes.append(process)
        self._wait_for_namespace(process)
        cable = ["link", "add", f"cable{index}", "type", "veth"]
        self._configure(*cable, "peer", "name", "eth0", "netns", str(process.pid))
        self._configure("link", "set", f"cable{index}", "master", "bridge0", "up")
        line = f"{self.addresses[index]} {self.names[index]} {self._file}\n"
        process.stdin.write(line.encode())
        process.stdin.close()
        return process

    def _wait_for_namespace(self, process: subprocess.Popen) -> None:
        """Waits until the process is in a network of its own."""
        outside = {Path(f"/proc/{pid}/ns/net").readlink() for pid in ("self", self._switch.pid)}
        while Path(f"/proc/{process.pid}/ns/net").readlink() in outside:
            assert process.poll() is None, "nsenter or unshare was refused"
