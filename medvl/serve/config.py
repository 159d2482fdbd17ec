"""Settings of the server."""

import dataclasses
import ipaddress
import os
import secrets

from medvl.common.config_io import check_within
from medvl.errors import ConfigError

TOKEN_VARIABLE = "MEDVL_SERVE_TOKEN"
_SHORTEST_TOKEN = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Address, access and limits of the server."""

    host: str = "127.0.0.1"
    """Address to listen on; any but this machine's own needs a token."""
    port: int = 8765
    """Port to listen on; 0 takes a free one."""
    token: str | None = None
    """Token that requests must carry, at least 16 characters; None: the value of the environment
    variable MEDVL_SERVE_TOKEN, else none on this machine and a random one elsewhere.
    """
    max_megabytes: int = 40
    """Largest upload; a radiograph has 5 to 30 MB, a CT 50 to 300."""
    max_voxels: int = 1 << 28
    """Largest volume: 512 MB at 16 bits. Volumes are read one at a time."""
    requests_per_minute: int = 120
    """Requests of one address in a minute."""
    waiting: int = 32
    """Requests that wait for the model at a time. Together with `max_megabytes` it bounds the
    memory: uploads in progress take as many bytes at most.
    """
    upload_seconds: float = 60.0
    """Seconds within which a request must have arrived."""
    stall_seconds: float = 5.0
    """Seconds without a byte after which an upload is given up."""
    header_seconds: float = 10.0
    """Seconds within which a connection must have sent the headers of a request."""
    connections_per_address: int = 64
    """Connections of one address at a time. Another one closes the one that waits longest for a
    request.
    """

    batch: int = 16
    """Images of several requests that a model encodes at a time; 1 encodes them one by one."""
    batch_wait: float = 0.004
    """Seconds that an image waits for others while the model is idle."""

    def __post_init__(self) -> None:
        if self.token is not None and (
            len(self.token) < _SHORTEST_TOKEN or not self.token.isascii()
        ):
            message = (
                f"expected a token of {_SHORTEST_TOKEN} ASCII characters or more, got "
                f"{len(self.token)}"
            )
            raise ConfigError(message, "out_of_range", field="token")
        check_within(self, "[0, 65535]", "port")
        check_within(self, "[0, 1]", "batch_wait")
        positive = (
            "max_megabytes",
            "max_voxels",
            "requests_per_minute",
            "waiting",
            "batch",
            "connections_per_address",
        )
        check_within(
            self, "(0, inf)", *positive, "upload_seconds", "stall_seconds", "header_seconds"
        )

    @property
    def max_bytes(self) -> int:
        """Largest body of a request."""
        return self.max_megabytes * 1_000_000

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def address_share(self) -> float:
        """Share of places and of bytes in progress that one address may have; on this machine
        alone, all have one.
        """
        return 1.0 if self.is_local else 0.5

    def with_token(self) -> "ServeConfig":
        """Return the settings with the token of the environment, or a random one where other
        machines can connect.
        """
        if self.token is not None:
            return self
        named = os.environ.get(TOKEN_VARIABLE)
        return dataclasses.replace(
            self, token=named or (None if self.is_local else secrets.token_urlsafe(24))
        )
