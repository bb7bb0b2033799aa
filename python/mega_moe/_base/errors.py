"""The exceptions and the warning of mega_moe. Bad values and types raise ValueError and TypeError as usual."""

from __future__ import annotations


class MegaMoEError(RuntimeError):
    """Base of every error that is not a plain bad value or bad type."""


class BackendRefusedError(MegaMoEError):
    """No backend, or not the named one, can serve the request; the message lists every reason."""


class PeerError(MegaMoEError):
    """Another rank refused this call, or is doing something else; the message names it and its reason."""


class RankTimeoutError(MegaMoEError):
    """A rank did not arrive in time; the message names the missing ranks, the call and the limit."""


class LibraryError(MegaMoEError):
    """The compiled library is needed and cannot be loaded; the message says why and what to install."""


class FallbackWarning(UserWarning):
    """The automatic choice is not the fused backend; the message says why."""
