"""The certificate of a server that speaks HTTPS."""

from __future__ import annotations

import ssl

from caudal.config import ServerConfig
from caudal.errors import ConfigError


def create_ssl_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What the flags ask for, None for plain HTTP. Raises ConfigError naming the flag at fault."""
    if config.ssl_certfile is None:
        for flag, value in (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
            ("--ssl-cert-reqs", config.ssl_cert_reqs or None),
        ):
            if value is not None:
                raise ConfigError(f"{flag}: needs --ssl-certfile")
        return None
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError("--ssl-cert-reqs: needs --ssl-ca-certs, whose clients are let in")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {_reason(error)}") from None
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ssl-ca-certs: {_reason(error)}") from None
    context.verify_mode = ssl.VerifyMode(config.ssl_cert_reqs)
    return context


def _no_password() -> str:
    """Keep OpenSSL from asking for one on the terminal."""
    raise ConfigError("--ssl-keyfile: the key is encrypted; give one that is not")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"not a usable certificate or key ({error.reason or 'unreadable'})"
    return f"cannot read the file: {error.strerror}"
