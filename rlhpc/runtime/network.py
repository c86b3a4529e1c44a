"""Network addresses and interfaces for connections between the hosts of a run."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

from rlhpc.runtime.allocation import slurm_nodes
from rlhpc.runtime.errors import ConfigError
from rlhpc.runtime.host import node_name, node_names
from rlhpc.runtime.slurm import TIMEOUT_S, ask

_SIOCGIFADDR = 0x8915


def address_of(interface: str) -> str:
    """Returns the IPv4 address of a network interface of this host.

    Raises:
        ConfigError: The interface does not exist or has no address; the message lists the interfaces with an address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            ifreq = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError as error:
            available_text = ", ".join(f"{name} ({address})" for name, address in interfaces().items()) or "none"
            raise ConfigError(
                f"cluster.interface is {interface!r}, which has no address on {node_name()} "
                f"({error.strerror}); there are: {available_text}"
            ) from None
    return socket.inet_ntoa(ifreq[20:24])


def interfaces() -> dict[str, str]:
    """Returns the IPv4 addresses of this host by network interface."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                ifreq = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue
            addresses[name] = socket.inet_ntoa(ifreq[20:24])
    return addresses


def interface_of(address: str) -> str | None:
    """Returns the network interface of this host with this address; None if no interface has this address."""
    return next((name for name, interface_address in interfaces().items() if interface_address == address), None)


def address_towards(host: str) -> str:
    """Returns this host's address on the route that the kernel chooses to another host.

    Raises:
        ConfigError: The kernel has no route to the host, or its name is unknown.
    """
    try:
        address = socket.getaddrinfo(host, 9, socket.AF_INET, socket.SOCK_DGRAM)[0][4]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"{node_name()} finds no way to {host}: {error.strerror}; name the network interface that the "
            "nodes share (cluster.interface=…)"
        ) from None


def query_node_addresses(node_names: list[str], timeout_s: float = TIMEOUT_S) -> dict[str, str]:
    """Queries Slurm for the addresses of nodes; returns them by node name. A node without an address maps to its name."""
    addresses = {name: name for name in node_names}
    for pairs in ask("scontrol", "--oneliner", "show", "node", ",".join(node_names), timeout_s=timeout_s).records:
        if pairs.get("NodeName") in addresses and pairs.get("NodeAddr"):
            addresses[pairs["NodeName"]] = pairs["NodeAddr"]
    return addresses


def address_for_partition(partition: str | None, interface: str | None) -> str:
    """Returns this host's address for jobs on a Slurm partition, or on the default partition if it is None.

    Raises:
        ConfigError: This host has no route to the partition's nodes, or Slurm does not list the nodes.
    """
    if interface:
        return address_of(interface)
    partition_option = [f"--partition={partition}"] if partition else []
    output = ask("sinfo", "--noheader", "--Node", *partition_option, "--format=%N")
    local_names = node_names(os.environ)
    names = list(dict.fromkeys(output.text.split())) if output.ok else []
    remote_nodes = [name for name in names if name not in local_names] or names
    if not remote_nodes:
        partition_text = f"partition {partition}" if partition else "the default partition"
        raise ConfigError(
            f"Slurm names no node of {partition_text} ({output.last_line}); name the interface to it (cluster.interface=…)"
        )
    return address_towards(query_node_addresses(remote_nodes[:1])[remote_nodes[0]])


def job_address(interface: str | None) -> str | None:
    """Returns this host's address for the other hosts of its Slurm job; None if there are no other hosts."""
    remote_nodes = [node.name for node in slurm_nodes(os.environ) if not node.is_local]
    if not remote_nodes:
        return None
    return (
        address_of(interface) if interface else address_towards(query_node_addresses(remote_nodes[:1])[remote_nodes[0]])
    )
