"""What a person may choose about the server itself. What concerns the engine is in `core.config`."""

import ipaddress
from dataclasses import dataclass

from steerpipe.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Checked on creation."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    api_keys: tuple[str, ...] = ()  # each is a user of its own; none: everybody may ask
    model_name: str | None = None  # as clients call it; None: the folder's name
    allowed_hosts: tuple[str, ...] = ()  # names, beside localhost and addresses, under which the server is reached
    cors_origins: tuple[str, ...] = ()  # web pages of other origins that may ask
    max_queue: int = 256  # sequences that may wait; one more is answered with 429
    max_body_bytes: int = 4 << 20
    drafts: bool = True  # prompts are worked on while they are typed
    timeout_seconds: float = 600.0  # for a whole request, waiting included
    grace_seconds: float = 30.0  # that running requests get when the server is told to end

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"port is {self.port}", fix="give --port a number from 0 to 65535")
        for name in ("max_queue", "max_body_bytes", "timeout_seconds", "grace_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}", fix=f"{name} must be 0 or more")
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key for key in self.api_keys):
            raise ConfigError("an API key is too short or not plain text", fix="use 8 or more letters and digits")
        if any("://" not in origin or origin == "*" for origin in self.cors_origins):
            raise ConfigError("an origin is not of the form https://host", fix="name each: --cors-origin https://host")
        if not self.api_keys and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} is reached by others, and there is no API key",
                fix="set STEERPIPE_API_KEY (or --api-key), or leave --host at 127.0.0.1",
            )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
