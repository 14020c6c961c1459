"""Two hosts on this machine: network namespaces with a cable between them that a test can cut."""

from __future__ import annotations

import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import TracebackType

from tests import ranks

NAMES = ("node-a", "node-b")
_ADDRESSES = ("10.99.0.1", "10.99.0.2")
_number = itertools.count()  # numbers of the hosts of this process


@cache
def missing() -> str | None:
    """Return why there can be no hosts here, or None."""
    if sys.platform != "linux" or any(shutil.which(each) is None for each in ("ip", "unshare")):
        return "there are no network namespaces (Linux, with ip and unshare)"
    if (reason := ranks.missing()) is not None:
        return reason
    launcher = ranks.mpirun()
    assert launcher is not None
    version = subprocess.run([*launcher, "--version"], capture_output=True, text=True, timeout=60)
    if "HYDRA" not in version.stdout:
        return "ranks in network namespaces are started by MPICH's mpirun"
    name = f"tensorgrad-{os.getpid()}-try"
    if _ip(f"netns add {name}", check=False) != 0:
        return "no right to make network namespaces"
    works = f"netns exec {name} unshare --uts hostname try"
    may = _ip(works, check=False) == 0
    _ip(f"netns del {name}")
    return None if may else "no right to name the host in a network namespace"


class Hosts:
    """Two hosts, which are gone at the end of the block with all that runs on them.

    Args:
        folder: for a few small files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        number = next(_number)
        self._spaces = [f"tensorgrad-{os.getpid()}-{number}-{name}" for name in NAMES]
        self._launched: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Hosts:
        a, b = self._spaces
        for space in self._spaces:
            _ip(f"netns add {space}")
        _ip(f"link add cable netns {a} type veth peer name cable netns {b}")
        for space, address in zip(self._spaces, _ADDRESSES, strict=True):
            _ip(f"-n {space} addr add {address}/24 dev cable")
            _ip(f"-n {space} link set cable up")
            _ip(f"-n {space} link set lo up")
        for name in NAMES:  # a host is its own loopback to itself, on many systems
            lines = ["127.0.0.1 localhost"]
            for each, address in zip(NAMES, _ADDRESSES, strict=True):
                lines.append(f"{'127.0.1.1' if each == name else address} {each}")
            (self._folder / f"hosts-{name}").write_text("\n".join(lines) + "\n")
        self._agent.write_text(
            '#!/bin/sh\n[ "$1" = -x ] && shift\nhost=$1\nshift\ncase $host in\n'
            + "".join(
                f"{address}) exec {self._on(number)} sh -c {shlex.quote(self._begin(number))}"
                ' sh "$*";;\n'
                for number, address in enumerate(_ADDRESSES)
            )
            + "esac\n"
        )
        self._agent.chmod(0o755)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, space in enumerate(self._spaces):
            self.kill(number)
            _ip(f"netns del {space}", check=False)
        if self._launched is not None:
            self._launched.wait()

    @property
    def _agent(self) -> Path:
        return self._folder / "agent.sh"

    def _on(self, host: int) -> str:
        return f"ip netns exec {self._spaces[host]} unshare --uts"

    def _begin(self, host: int) -> str:
        """Return the shell's commands that make a process one of this host, and run its $1."""
        names = shlex.quote(str(self._folder / f"hosts-{NAMES[host]}"))
        return f'mount --bind {names} /etc/hosts && hostname {NAMES[host]} && eval "exec $1"'

    def launch(self, script: Path, args: Sequence[object] = ()) -> None:
        """Start a script on two ranks of each host, which reach the others over TCP alone."""
        launcher = ranks.mpirun()
        assert launcher is not None
        command = [
            *launcher,
            *("-launcher", "ssh", "-launcher-exec", str(self._agent)),
            *("-localhost", _ADDRESSES[0], "-hosts", ",".join(_ADDRESSES)),
            *("-ppn", "2", "-n", "4", sys.executable, str(script), *map(str, args)),
        ]
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ranks.ROOT),
            "MPIR_CVAR_CH4_NETMOD": "ofi",
            "FI_PROVIDER": "tcp",
        }
        output = (self._folder / "mpirun.txt").open("wb")
        with output:
            self._launched = subprocess.Popen(
                [*self._on(0).split(), "sh", "-c", self._begin(0), "sh", shlex.join(command)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def link_down(self) -> None:
        """Unplug the cable of the second host."""
        _ip(f"-n {self._spaces[1]} link set cable down")

    def drop_packets(self) -> None:
        """Lose all packets, in both directions: the links stay up."""
        nobody = "02:00:00:00:00:99"  # no host has this hardware address
        for space, other in zip(self._spaces, reversed(_ADDRESSES), strict=True):
            _ip(f"-n {space} neigh replace {other} lladdr {nobody} dev cable")

    def power_off(self, host: int) -> None:
        """End a host so that the other is not told."""
        self.link_down()
        self.kill(host)

    def kill(self, host: int) -> None:
        """Kill all processes of a host."""
        found = subprocess.run(
            ["ip", "netns", "pids", self._spaces[host]], capture_output=True, text=True
        )
        for pid in map(int, found.stdout.split()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _ip(words: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True, timeout=60)
    assert not check or done.returncode == 0, f"ip {words}: {done.stderr}"
    return done.returncode
