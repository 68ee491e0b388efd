"""How the processes of a run find each other."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_llm.tools.doctor.finding import Check, Finding, Surroundings, note, ok, problem, warning

_SIOCGIFFLAGS, _SIOCGIFADDR, _IFF_UP = 0x8913, 0x8915, 1
_CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Interface:
    """A network interface.

    Attributes:
        address: IPv4, or None.
    """

    name: str
    up: bool
    address: str | None

    @property
    def leads_out(self) -> bool:
        """Whether other nodes may be behind it."""
        inner = self.name.startswith(("lo", "docker", "veth", "virbr", "br-", "cni", "flannel", "cali"))
        return self.up and self.address is not None and not inner


def interfaces() -> list[Interface]:
    """The interfaces of this network namespace, in the kernel's order."""
    found: list[Interface] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            flags: int = struct.unpack("H", fcntl.ioctl(asked, _SIOCGIFFLAGS, request)[16:18])[0]
            try:
                address = socket.inet_ntoa(fcntl.ioctl(asked, _SIOCGIFADDR, request)[20:24])
            except OSError:
                address = None
            found.append(Interface(name, bool(flags & _IFF_UP), address))
    return found


def resolve(name: str) -> list[str]:
    """IPv4 addresses of ``name``; none where it does not resolve."""
    try:
        answers = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror:
        return []
    return sorted({str(answer[4][0]) for answer in answers})


def _loopback(addresses: list[str]) -> bool:
    return bool(addresses) and all(address.startswith("127.") for address in addresses)


def host_name(s: Surroundings) -> Iterator[Finding]:
    """What this host's own name resolves to: the address that gloo tells the other nodes."""
    name = socket.gethostname()
    addresses = resolve(name)
    what = f"the host name {name} resolves to {', '.join(addresses) or 'nothing'}"
    foreign = sorted(set(addresses) - {i.address for i in interfaces() if i.address} if addresses else set())
    if s.environ.get("GLOO_SOCKET_IFNAME"):
        yield ok(f"{what}; gloo takes GLOO_SOCKET_IFNAME instead")
    elif addresses and not _loopback(addresses) and not foreign:
        yield ok(what)
    elif s.nodes > 1:
        yield problem(
            what,
            "gloo tells the other nodes to connect to this address; they wait, then time out",
            "export GLOO_SOCKET_IFNAME=<interface> on every node, or mend the line of /etc/hosts",
        )
    else:
        yield note(
            what,
            "no harm on one node; on several, gloo would be told this address",
            "for several nodes: export GLOO_SOCKET_IFNAME=<interface>",
        )


def gloo_interface(s: Surroundings) -> Iterator[Finding]:
    """The interface that gloo takes."""
    there = {i.name: i for i in interfaces()}
    asked = s.environ.get("GLOO_SOCKET_IFNAME")
    if asked is None:
        addresses = resolve(socket.gethostname())
        taken = [i.name for i in there.values() if i.address in addresses]
        yield ok(f"gloo takes {', '.join(taken) or 'lo'}: the address of the host name")
        return
    for name in asked.split(","):
        if name in there and there[name].up and there[name].address is not None:
            yield ok(f"gloo takes {name} ({there[name].address}): GLOO_SOCKET_IFNAME")
        else:
            state = "does not exist" if name not in there else "is down, or has no IPv4 address"
            yield problem(
                f"GLOO_SOCKET_IFNAME={asked}: {name} {state}",
                "gloo cannot open a connection: 'Unable to find address for'",
                f"one of {', '.join(i.name for i in there.values() if i.up and i.address)} (ip -br addr)",
            )


def collective_interface(s: Surroundings) -> Iterator[Finding]:
    """The interfaces that NCCL and HCCL take."""
    for library, device in (("NCCL", "cuda"), ("HCCL", "npu")):
        variable = f"{library}_SOCKET_IFNAME"
        asked = s.environ.get(variable)
        outward = [i.name for i in interfaces() if i.leads_out]
        if asked is None:
            if s.probe.device == device and s.nodes > 1 and len(outward) > 1:
                yield warning(
                    f"{library} chooses among {', '.join(outward)} by itself",
                    "it may take one that does not lead to the other nodes: a time-out while the groups are made",
                    f"export {variable}={outward[0]}",
                )
            continue
        matched = match_interfaces(asked, [i.name for i in interfaces() if i.up])
        if matched:
            yield ok(f"{library} takes {', '.join(matched)}: {variable}={asked}")
        else:
            yield (problem if s.probe.device == device else warning)(
                f"{variable}={asked} fits no interface that is up",
                f"{library} finds no address to bind",
                f"one of {', '.join(outward) or 'those that ip -br addr shows'}; =NAME is exact, ^NAME leaves out",
            )


def match_interfaces(pattern: str, names: list[str]) -> list[str]:
    """The ``names`` that NCCL's and HCCL's syntax selects: prefixes, ``=`` exact names, ``^`` all but these."""
    without = pattern.startswith("^")
    words = pattern.removeprefix("^")
    exact = words.startswith("=")
    wanted = [word for word in words.removeprefix("=").split(",") if word]

    def fits(name: str) -> bool:
        return name in wanted if exact else name.startswith(tuple(wanted))

    return [name for name in names if fits(name) != without]


def launcher(s: Surroundings) -> Iterator[Finding]:
    """That the launcher's variables are all there or all absent."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = {name: s.environ[name] for name in names if name in s.environ}
    number = s.environ.get("RANK", "")
    if "RANK" in given and len(given) < len(names):
        yield problem(
            f"RANK is set, and {', '.join(name for name in names if name not in given)} not",
            "a process with RANK waits for the others of its launcher",
            "start with torchrun, or unset RANK",
        )
    elif "WORLD_SIZE" in given and "RANK" not in given and given["WORLD_SIZE"] != "1":
        yield problem(
            f"WORLD_SIZE={given['WORLD_SIZE']} without RANK",
            "the layout is computed for these processes, and the run is one",
            "unset WORLD_SIZE, or start with torchrun",
        )
    elif "RANK" in given and not (
        number.isdecimal() and given["WORLD_SIZE"].isdecimal() and int(number) < int(given["WORLD_SIZE"])
    ):
        yield problem(
            f"RANK={number} of WORLD_SIZE={given['WORLD_SIZE']}",
            "the ranks of a run are 0 to WORLD_SIZE - 1",
            "start with torchrun, which sets both",
        )
    elif "RANK" in given:
        by = "torchrun" if "TORCHELASTIC_RUN_ID" in s.environ else "a launcher other than torchrun"
        yield ok(f"rank {number} of {given['WORLD_SIZE']}, started by {by}")
    else:
        yield ok("no launcher: one process")


def meeting_point(s: Surroundings) -> Iterator[Finding]:
    """MASTER_ADDR and MASTER_PORT: they resolve, and node 0 can listen there."""
    name, port = s.environ.get("MASTER_ADDR"), s.environ.get("MASTER_PORT")
    if port is not None and not (port.isdecimal() and 0 < int(port) < 65536):
        yield problem(f"MASTER_PORT={port} is no port", "the processes cannot meet", "a number from 1024 to 65535")
        return
    if name is None:
        return
    addresses = resolve(name)
    if not addresses:
        yield problem(
            f"MASTER_ADDR={name} does not resolve",
            "this node cannot find node 0",
            "an address, or a line in /etc/hosts of every node",
        )
        return
    what = f"MASTER_ADDR={name} ({', '.join(addresses)})"
    if s.nodes > 1 and _loopback(addresses):
        yield problem(
            f"{what} on {s.nodes} nodes",
            "each node waits at itself for the others",
            "the address of node 0 that the others can reach",
        )
    elif s.node == 0:
        yield from _listening(s, what, addresses, port)
    else:
        yield _reaching(what, addresses[0], port)


def _listening(s: Surroundings, what: str, addresses: list[str], port: str | None) -> Iterator[Finding]:
    mine = {i.address for i in interfaces()}
    if not _loopback(addresses) and not mine & set(addresses):
        yield problem(
            f"{what} is not an address of this node, which is node 0",
            "the processes of all nodes wait where nobody listens",
            "MASTER_ADDR is that of node 0; else look at NODE_RANK",
        )
        return
    # Under torchrun its own store listens there by now.
    if port is not None and "TORCHELASTIC_RUN_ID" not in s.environ:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind(("", int(port)))
            except OSError as error:
                taken = error.errno == errno.EADDRINUSE
                yield problem(
                    f"MASTER_PORT={port}: {os.strerror(error.errno or 0)}",
                    "another program, perhaps a run that still ends, listens there"
                    if taken
                    else "the processes cannot meet there",
                    "another MASTER_PORT; ss -ltnp shows who listens" if taken else "a port from 1024 on",
                )
                return
    yield ok(f"{what} is this node")


def _reaching(what: str, address: str, port: str | None) -> Finding:
    try:
        with socket.create_connection((address, int(port or 1)), timeout=_CONNECT_SECONDS):
            return ok(f"{what} answers")
    except ConnectionRefusedError:
        return ok(f"{what} can be reached; nothing listens there yet")
    except OSError as error:
        return warning(
            f"{what}, port {port}: {error}",
            "this node cannot reach node 0, or a firewall drops what it sends",
            f"ping {address}; open MASTER_PORT and the ports above 1024 between the nodes",
        )


CHECKS: tuple[Check, ...] = (launcher, host_name, gloo_interface, collective_interface, meeting_point)
