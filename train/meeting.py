"""Where ranks on several machines do not find each other: what is wrong is said, with what to set.

gloo and NCCL listen on one network interface each. gloo takes the one that the machine's own name stands for, which on
many machines is the loopback (127.0.1.1 in /etc/hosts): the other machines would then knock at their own doors, for as
long as a collective may take. Not here: the process group itself (engine.py).
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

INTERFACE = "GLOO_SOCKET_IFNAME"
REMEDY = (
    f"set {INTERFACE} and NCCL_SOCKET_IFNAME, in every rank's environment, to the interface between the machines, as "
    "eth0 or ib0 (ip -br addr lists them)"
)


def check_own_name(world_size: int, local_size: int) -> None:
    """Raises ValueError where there are ranks on other machines, and this one's name stands for an address that only it
    can reach."""
    if world_size <= local_size or os.environ.get(INTERFACE):
        return
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except socket.gaierror:
        found = "stands for no address"
    else:
        if not ip_address(str(address).partition("%")[0]).is_loopback:
            return
        found = f"stands for {address} (/etc/hosts), which no other machine reaches"
    raise ValueError(f"{INTERFACE}: not set, and this machine's name {name} {found}: {REMEDY}")


@contextmanager
def failures_told(error_type: type[Exception]) -> Iterator[None]:
    """Inside, where the ranks meet, what goes wrong becomes an error of this type that names place and remedy."""
    try:
        yield
    except RuntimeError as error:
        given = os.environ
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        set_to = "".join(f", {name}={given[name]}" for name in (INTERFACE, "NCCL_SOCKET_IFNAME") if name in given)
        raise error_type(
            f"rank {given['RANK']} of {given['WORLD_SIZE']} on {socket.gethostname()} does not find the others at "
            f"{given['MASTER_ADDR']}:{given['MASTER_PORT']}{set_to}: {reason}; where they are on several machines, "
            f"{REMEDY}"
        ) from error
