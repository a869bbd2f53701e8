"""Where the keys come from, and when they are asked for again.

In this order: the options (keys, or a callable), a profile that the options name, the environment, a web identity, the
profile of the environment, the container's service, the machine's. Whatever expires is fetched again before it does,
and once more when the server refuses it.
"""

from __future__ import annotations

import configparser
import http.client
import importlib.util
import json
import logging
import os
import shlex
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from ckptfmt.backends.fork_locks import ForkLock
from ckptfmt.backends.http_client import is_this_machine
from ckptfmt.backends.s3_signing import Credentials
from ckptfmt.backends.xml_document import parsed
from ckptfmt.errors import AccessDenied, CkptError, InvalidInput, Unavailable

log = logging.getLogger("ckptfmt")

_AHEAD_SECONDS: Final = 120.0
_ASKED_AGAIN_SECONDS: Final = 30.0
"""How long a refusal of keys that did not change is believed before their source is asked again."""
_RESTED_SECONDS: Final = 5.0
"""How long a source that failed is let alone while the keys that it gave before are good."""
_SERVICE_SECONDS: Final = 5.0
_CONTAINER_HOSTS: Final = frozenset({"169.254.170.2", "169.254.170.23", "fd00:ec2::23"})
"""Where the services of containers are reached without TLS: no packet leaves the machine."""

Source = Callable[[], Credentials | None]


class CredentialChain:
    """The keys for one place, from the first source that has any, and from then on from that one. Thread-safe."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources: Final = dict(sources)
        self._lock: Final = ForkLock()
        self._current: Credentials | None = None
        self._chosen: str | None = None
        self._asked = 0.0
        self._rests_until = 0.0

    def current(self) -> Credentials:
        """Return keys that are not about to expire. ``AccessDenied`` if no source has any."""
        with self._lock:
            found = self._current
            if found is None or (found.expires is not None and found.expires - time.time() < _AHEAD_SECONDS):
                found = self._current = self._fetch() if found is None else self._fetch_ahead(found)
            return found

    def _fetch_ahead(self, found: Credentials) -> Credentials:
        """Others in the place of ``found``, which expires soon; itself while it is good and there are none."""
        is_good = found.expires is not None and found.expires > time.time()
        if is_good and time.monotonic() < self._rests_until:
            return found
        try:
            return self._fetch()
        except Exception as error:  # a callable of the user raises what it likes
            if not is_good:
                raise
            self._rests_until = time.monotonic() + _RESTED_SECONDS
            log.warning("S3 keys that expire soon could not be fetched again yet: %s", type(error).__name__)
            return found

    def renew(self, refused: Credentials) -> bool:
        """Ask the source again, since the server refused these. Returns whether there are others now."""
        with self._lock:
            if self._current != refused and self._current is not None:
                return True  # another thread did
            now = time.monotonic()
            if self._asked and now - self._asked < _ASKED_AGAIN_SECONDS:
                return False
            self._asked = now
            self._current = self._fetch()
            return self._current != refused

    def _fetch(self) -> Credentials:
        if self._chosen is not None:  # another one may give the keys of somebody else
            found = self._sources[self._chosen]()
            if found is not None:
                return found
            raise Unavailable(f"S3 credentials: {self._chosen} gave keys before, and gives none now; try again later")
        for name, source in self._sources.items():
            found = source()
            if found is not None:
                self._chosen = name
                return found
        raise AccessDenied(
            "no S3 credentials: looked in " + ", ".join(self._sources) + "; give key= and secret= in storage_options, "
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or anon=True for a public bucket",
            kind="no_credentials",
        )


def chain(
    *,
    key: str | None,
    secret: str | None,
    token: str | None,
    provider: Callable[[], Mapping[str, Any]] | None,
    profile: str | None,
    region: str,
) -> CredentialChain:
    """Build the chain for what the options say."""
    if (key is None) != (secret is None):
        raise InvalidInput("storage_options: give both key and secret, or neither")
    if provider is not None:
        return CredentialChain({"the option credentials": lambda: _from_mapping(provider())})
    if key is not None and secret is not None:
        fixed = Credentials(key, secret, token)
        return CredentialChain({"the options": lambda: fixed})
    if profile is not None:
        return CredentialChain({f"the profile {profile!r}": lambda: _from_profile(profile)})
    return CredentialChain(
        {
            "AWS_ACCESS_KEY_ID": _from_environment,
            "AWS_WEB_IDENTITY_TOKEN_FILE": lambda: _from_web_identity(region),
            "~/.aws": lambda: _from_profile(os.environ.get("AWS_PROFILE") or "default"),
            "the container's service": _from_container,
            "the machine's metadata service": _from_machine,
        }
    )


def _from_environment() -> Credentials | None:
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
    return Credentials(key, secret, os.environ.get("AWS_SESSION_TOKEN") or None) if key and secret else None


_NAMES: Final = (
    ("access_key_id", "secret_access_key", "token", "expires_at"),
    ("key", "secret", "token", "expires_at"),
    ("AccessKeyId", "SecretAccessKey", "Token", "Expiration"),
    ("AccessKeyId", "SecretAccessKey", "SessionToken", "Expiration"),
)


def _from_mapping(found: Any) -> Credentials:
    """Keys under the names that S3 tools use; the expiry is a datetime, its ISO text or seconds of the epoch."""
    if isinstance(found, Mapping):
        for key, secret, token, expires in _NAMES:
            if found.get(key) and found.get(secret) and (found.get(token) or token != "Token"):
                return Credentials(found[key], found[secret], found.get(token) or None, _epoch(found.get(expires)))
    raise AccessDenied(
        "storage_options: credentials() must return a mapping with key, secret, and perhaps token and expires_at, "
        f"not {type(found).__name__}",
        kind="no_credentials",
    )


def _epoch(value: Any) -> float | None:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    return float(value.timestamp())


# -- profiles -----------------------------------------------------------------------------------------
def profile_settings(name: str | None = None) -> dict[str, str]:
    """What ``~/.aws/config`` and ``~/.aws/credentials`` say of a profile; the latter wins."""
    name = name or os.environ.get("AWS_PROFILE") or "default"
    settings: dict[str, str] = {}
    for variable, default, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read_string(Path(os.environ.get(variable) or default).expanduser().read_text())
        except (OSError, UnicodeDecodeError, configparser.Error):
            continue
        if parser.has_section(section):
            settings |= dict(parser.items(section))
    return settings


def _from_profile(name: str) -> Credentials | None:
    settings = profile_settings(name)
    key, secret = settings.get("aws_access_key_id"), settings.get("aws_secret_access_key")
    if key and secret:
        return Credentials(key, secret, settings.get("aws_session_token"))
    if "credential_process" in settings:
        return _from_process(name, settings["credential_process"])
    wanting = sorted(set(settings) & {"role_arn", "sso_session", "sso_start_url", "login_session"})
    return _from_botocore(name, wanting[0]) if wanting else None


def _from_process(name: str, command: str) -> Credentials:
    try:
        told = subprocess.run(shlex.split(command), capture_output=True, timeout=60, check=True).stdout
        return _from_mapping(json.loads(told))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise AccessDenied(
            f"the credential_process of the profile {name!r} gave no keys ({type(error).__name__}); run it by hand",
            kind="no_credentials",
        ) from None  # the command and what it printed may hold secrets


def _from_botocore(name: str, setting: str) -> Credentials | None:
    if importlib.util.find_spec("botocore") is None:
        raise AccessDenied(
            f"the profile {name!r} uses {setting}, which needs botocore: pip install 'ckptfmt[s3]', or pass a callable "
            "as credentials= in storage_options",
            kind="no_credentials",
        )
    import botocore.session  # type: ignore[import-untyped, import-not-found, unused-ignore]

    try:
        found = botocore.session.Session(profile=name).get_credentials()
        frozen = found.get_frozen_credentials()
    except Exception as error:  # botocore's exceptions share no base with those of its transports
        raise AccessDenied(f"the profile {name!r}: {type(error).__name__}: {error}", kind="no_credentials") from error
    # Its session refreshes by itself; asked again in a quarter of an hour, it does.
    return Credentials(frozen.access_key, frozen.secret_key, frozen.token, time.time() + 900)


# -- services -----------------------------------------------------------------------------------------
def _from_web_identity(region: str) -> Credentials | None:
    file, role = os.environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"), os.environ.get("AWS_ROLE_ARN")
    if not (file and role):
        return None
    query = {
        "Action": "AssumeRoleWithWebIdentity",
        "Version": "2011-06-15",
        "RoleArn": role,
        "RoleSessionName": os.environ.get("AWS_ROLE_SESSION_NAME") or "ckptfmt",
        "WebIdentityToken": _text_of(file),
    }
    endpoint = os.environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
    told = _ask(endpoint, data=urlencode(query).encode())
    if told is None:
        raise AccessDenied(
            f"{endpoint} gave no keys for the role {role}; check its trust policy", kind="no_credentials"
        )
    try:
        fields = {element.tag: element.text for element in parsed(told).iter()}
    except ValueError:
        fields = {}
    return _from_mapping(fields)


def _text_of(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except OSError as error:
        raise AccessDenied(f"the token file {file}: {error.strerror}", kind="no_credentials") from error


def _from_container() -> Credentials | None:
    url = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if relative := os.environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        url = f"http://169.254.170.2{relative}"
    if not url:
        return None
    _require_near(url)
    token = os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
    if file := os.environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = _text_of(file)
    return _from_json(_ask(url, {"Authorization": token} if token else {}))


def _require_near(url: str) -> None:
    """Keys are not asked for where anybody on the way could read them."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    host = parts.hostname or ""
    if parts.scheme != "https" and not (parts.scheme == "http" and (host in _CONTAINER_HOSTS or is_this_machine(host))):
        raise AccessDenied(
            f"AWS_CONTAINER_CREDENTIALS_FULL_URI leads to {host or 'no host'} without TLS; use https://",
            kind="no_credentials",
        )


def _from_machine() -> Credentials | None:
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    root = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254"
    token = _ask(f"{root}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "21600"}, method="PUT", seconds=1)
    if token is None:
        return None
    headers = {"X-aws-ec2-metadata-token": token.decode("ascii", "replace")}
    place = f"{root}/latest/meta-data/iam/security-credentials/"
    role = _ask(place, headers)
    return _from_json(_ask(place + role.decode("ascii", "replace").splitlines()[0], headers)) if role else None


def _from_json(told: bytes | None) -> Credentials | None:
    try:
        return None if told is None else _from_mapping(json.loads(told))
    except (ValueError, CkptError):
        return None


def _ask(
    url: str,
    headers: Mapping[str, str] = {},
    *,
    data: bytes | None = None,
    method: str | None = None,
    seconds: float = _SERVICE_SECONDS,
) -> bytes | None:
    """Past any proxy: these services are near, and what they tell is for nobody else; nor do they lead elsewhere."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stay)
    try:
        request = urllib.request.Request(url, data=data, headers=dict(headers), method=method)
        with opener.open(request, timeout=seconds) as response:
            return bytes(response.read(1 << 20))
    except (OSError, ValueError, http.client.HTTPException):
        return None


class _Stay(urllib.request.HTTPRedirectHandler):
    """Where a redirect leads, urllib would tell the token in the headers."""

    def redirect_request(self, *asked: Any) -> None:
        return None
