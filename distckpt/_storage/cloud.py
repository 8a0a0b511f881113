"""S3, Google Cloud Storage and Azure through obstore.

boto3 finds the credentials, region and endpoint of S3 as all AWS tools do, and lists unfinished
multipart uploads, which obstore cannot do.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np

from distckpt._base.memory import Bytes
from distckpt._base.threads import PART_BYTES
from distckpt._storage.cloud_errors import is_busy, is_temporary, os_error, text_of
from distckpt._storage.file_state import FileState
from distckpt._storage.fsspec_urls import check_settings, settings_of
from distckpt._storage.remote import (
    NO_BYTES,
    PROVIDERS,
    RETRY_SECONDS,
    NoConditionsError,
    RefusedError,
    RemoteLocation,
    Upload,
    too_large,
)

logger = logging.getLogger(__name__)

_MAX_PARTS = 10_000
_MAX_REMOVED = 1000
"""Maximum number of objects that one request removes."""
_ATTEMPTS = 8
"""Attempts at a request, unless AWS_MAX_ATTEMPTS says otherwise."""
_ATTEMPTS_WHILE_BUSY = 20
"""Attempts at a request that the store refuses as too many."""
_REQUEST_LIMIT = timedelta(minutes=2)


_CONTAINER = re.compile(r"[A-Za-z0-9._-]+(@[A-Za-z0-9.-]+)?")


class CloudLocation(RemoteLocation):
    """An object, or a prefix of objects, of a cloud store."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        scheme, _, rest = location.partition("://")
        container, _, self._path = rest.partition("/")
        if not _CONTAINER.fullmatch(container):
            raise OSError(
                errno.EINVAL, f"{container!r} is no name of a bucket or container", location
            )
        if self._path and not {"", ".", ".."}.isdisjoint(self._path.split("/")):
            raise OSError(errno.EINVAL, "a part of the path is empty, '.' or '..'", location)
        self.num_attempts = _num_attempts()
        self._connection = _connect(location, scheme, container)
        self._store = self._connection.store

    def kind(self) -> Literal["file", "directory"] | None:
        if self._path and self._head() is not None:
            return "file"
        if self._request(lambda: next(self._store.list(self._path, chunk_size=1), ())):
            return "directory"
        return None

    def list_names(self) -> list[str]:
        listing = self._request(lambda: self._store.list_with_delimiter(self._path))
        names = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])]
        if not names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.location)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def list_files(self) -> list[str]:
        return sorted(self.list_states())

    def size(self) -> int:
        return self.state().num_bytes

    def modified_time(self) -> float | None:
        return self.state().modified

    def state(self) -> FileState:
        return _state_of(self._request(lambda: self._store.head(self._path)))

    def list_states(self) -> dict[str, FileState]:
        entries = self._request(lambda: self._store.list(self._path).collect())
        states = {}
        for entry in entries:
            name = entry["path"].removeprefix(self._path).lstrip("/")
            states[name] = _state_of(entry)
        return states

    def read(self, max_bytes: int | None = None) -> bytes:
        def fetch() -> Any:
            answer = self._store.get(self._path)
            if max_bytes is not None and answer.meta["size"] > max_bytes:
                raise too_large(max_bytes, self.location)
            return answer.bytes()

        return bytes(self._request(fetch))

    def read_range(self, start: int, num_bytes: int) -> Bytes:
        if not num_bytes:
            return NO_BYTES
        try:
            data = self._request(
                lambda: self._store.get_range(self._path, start=start, length=num_bytes)
            )
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            # The range begins after the end.
            return NO_BYTES
        return np.frombuffer(data, np.uint8)

    def write(self, data: bytes) -> None:
        self._request(lambda: self._store.put(self._path, data, chunk_size=PART_BYTES))

    def write_stream(
        self,
        content: Callable[[], Iterable[bytes]],
        num_bytes: int,
        num_requests: int,
        part_bytes: int,
    ) -> None:
        streams = self._connection.streams
        options = {
            "chunk_size": max(part_bytes, -(-num_bytes // _MAX_PARTS)),
            "max_concurrency": num_requests,
        }
        failures: list[Exception] = []

        def pieces() -> Iterator[bytes]:
            failures.clear()
            try:
                yield from content()
            except Exception as error:
                failures.append(error)
                raise

        try:
            # obstore aborts the upload when a part, or the content, fails.
            self._request(lambda: streams.put(self._path, pieces(), use_multipart=True, **options))
        except OSError as error:
            if failures and failures[-1] is not error:
                # This error is about the attempt to abort the upload.
                raise failures[-1] from error
            is_missing = isinstance(error, FileNotFoundError) and error.filename == self.location
            # An attempt whose answer was lost may have completed the upload.
            head = self._head() if is_missing else None
            if head is None or head["size"] != num_bytes:
                raise

    def open_for_writing(self) -> Any:
        connection = self._connection
        file = connection.obstore.open_writer(
            connection.streams, self._path, buffer_size=PART_BYTES
        )
        return _Writer(file, self.location)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda: self._store.delete(self._path))

    def remove_many(self, locations: Sequence[str]) -> None:
        if not self.location.startswith(("s3://", "s3a://")):
            # In other stores, a request for many objects fails if one of them is not there.
            super().remove_many(locations)
            return
        paths = [location.partition("://")[2].partition("/")[2] for location in locations]
        for first in range(0, len(paths), _MAX_REMOVED):
            self._request(
                functools.partial(self._store.delete, paths[first : first + _MAX_REMOVED])
            )

    def version(self) -> Any:
        head = self._head()
        if not head:
            return head
        return {name: head[name] for name in ("e_tag", "version") if head[name] is not None}

    def _put_if(self, known_version: Any, data: bytes) -> bool:
        mode = "create" if known_version is None else known_version
        num_attempts = 0

        def put() -> None:
            nonlocal num_attempts
            num_attempts += 1
            self._store.put(self._path, data, mode=mode)

        try:
            self._request(put)
        except FileExistsError:
            return False
        except PermissionError as error:
            # An earlier attempt may have been carried out, and its answer lost.
            if num_attempts > 1:
                raise
            raise RefusedError(error.errno, error.strerror, error.filename) from error
        except FileNotFoundError:
            # The object of the known version has been removed.
            if known_version is None:
                raise
            return False
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            raise NoConditionsError(error.errno, error.strerror, error.filename) from error
        return True

    def list_uploads(self) -> list[Upload]:
        client = self._connection.s3_client
        bucket = self._connection.container
        if client is None:
            return []
        pages = client.get_paginator("list_multipart_uploads").paginate(
            Bucket=bucket, Prefix=self._path
        )

        def fetch() -> list[Any]:
            items: list[Any] = []
            for page in pages:
                items += page.get("Uploads", [])
            return items

        try:
            items = self._request(fetch)
        except OSError as error:
            self._warn_of_uploads("listed", "s3:ListBucketMultipartUploads", error)
            return []
        prefix = self._path and f"{self._path}/"
        root = self.location.removesuffix(self._path).rstrip("/")
        uploads = []
        for item in items:
            key = item["Key"]
            if key == self._path or key.startswith(prefix):
                uploads.append(Upload(f"{root}/{key}", item["UploadId"]))
        return uploads

    def abort(self, upload: Upload) -> None:
        client = self._connection.s3_client
        bucket = self._connection.container
        key = upload.location.partition("://")[2].partition("/")[2]
        try:
            self._request(
                lambda: client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.id)
            )
        except FileNotFoundError:
            return
        except OSError as error:
            self._warn_of_uploads("aborted", "s3:AbortMultipartUpload", error)

    def _warn_of_uploads(self, action: str, permission: str, error: OSError) -> None:
        """Warn once about uploads that stay; no save fails for that.

        No removal does, either.
        """
        connection = self._connection
        if action in connection.warned:
            return
        connection.warned.add(action)
        logger.warning(
            "unfinished uploads in the bucket %s cannot be %s: %s. Parts that killed processes "
            "have uploaded stay there and cost money: allow %s, or give the bucket a lifecycle "
            "rule AbortIncompleteMultipartUpload",
            connection.container, action, error.strerror, permission,
        )  # fmt: skip

    def _head(self) -> Any:
        """Return the metadata of the object, None when there is none."""
        try:
            return self._request(lambda: self._store.head(self._path))
        except FileNotFoundError:
            return None

    def _attempts_after(self, error: Exception) -> int:
        if is_busy(error):
            return _num_attempts(_ATTEMPTS_WHILE_BUSY)
        return self.num_attempts

    def _is_temporary(self, error: Exception) -> bool:
        return is_temporary(error)

    def _translated(self, error: Exception) -> Exception:
        return os_error(error, self.location)


class _Writer(NamedTuple):
    """An object that is written in one stream."""

    file: Any
    location: str

    def write(self, data: bytes | memoryview) -> None:
        with _naming(self.location):
            self.file.write(data)

    def close(self) -> None:
        with _naming(self.location):
            self.file.close()


@contextlib.contextmanager
def _naming(location: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise os_error(error, location) from error


# --- Connections ----------------------------------------------------------------------------------


class _Connection(NamedTuple):
    """The clients of a bucket or container.

    `store` makes each request once, and `RemoteLocation` repeats it; so does boto3's `s3_client`,
    which is None for other stores and if nothing is signed. `streams` itself repeats the requests
    of multipart uploads, one by one. `warned` holds the warnings about unfinished uploads.
    """

    obstore: Any
    store: Any
    streams: Any
    container: str
    s3_client: Any
    warned: set[str]


def _connect(location: str, scheme: str, container: str) -> _Connection:
    variables = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "HOME")
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(variables))
    )
    try:
        if empty := [name for name, value in environment if "ENDPOINT" in name and not value]:
            raise ValueError(f"the environment variable {empty[0]} is empty: unset it")
        check_settings(PROVIDERS[scheme])
        return _connection_in(environment, scheme, container)
    except ImportError as error:
        raise ImportError(
            f"{location}: {error}: pip install 'distckpt[{PROVIDERS[scheme]}]'"
        ) from error
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else errno.EINVAL
        raise OSError(number, f"{type(error).__name__}: {text_of(error)}", location) from error


@functools.lru_cache(maxsize=64)
def _connection_in(
    environment: tuple[tuple[str, str], ...], scheme: str, container: str
) -> _Connection:
    """Connect by the environment's settings; a change makes a new connection."""
    obstore = importlib.import_module("obstore")
    stores = importlib.import_module("obstore.store")
    provider = PROVIDERS[scheme]
    client = None
    if settings_of(provider):
        logger.warning(
            "fsspec's settings of %s:// are not read: use the environment instead", scheme
        )
    name = container
    config: dict[str, Any] = {}
    if provider == "s3":
        kind = stores.S3Store
        config, client = _s3_config(container)
    elif provider == "gcs":
        kind = stores.GCSStore
        if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):
            config = {
                "base_url": emulator,
                "credential_provider": lambda: {"token": "none", "expires_at": None},
            }
    else:
        kind = stores.AzureStore
        name = container.partition("@")[0]
        config = _azure_config(container)

    def store(num_attempts: int) -> Any:
        return kind(
            name,
            **config,
            client_options={"timeout": _REQUEST_LIMIT, "allow_http": True},
            retry_config={
                "max_retries": num_attempts - 1,
                "retry_timeout": timedelta(seconds=RETRY_SECONDS),
            },
        )

    # The first requests of the store have shown that it is reached.
    streams = store(_num_attempts(_ATTEMPTS_WHILE_BUSY))
    return _Connection(obstore, store(1), streams, container, client, set())


def _num_attempts(default: int = _ATTEMPTS) -> int:
    text = os.environ.get("AWS_MAX_ATTEMPTS") or str(default)
    if not text.isdecimal():
        raise ValueError(f"The environment variable AWS_MAX_ATTEMPTS is {text!r}, not a number.")
    return int(text)


def _s3_config(bucket: str) -> tuple[dict[str, Any], Any]:
    """Return obstore's configuration for S3, and boto3's client.

    The client is None if nothing is signed.
    """
    session = importlib.import_module("boto3").session.Session()
    retries = importlib.import_module("botocore.config").Config(retries={"total_max_attempts": 1})
    client = session.client("s3", config=retries)
    config: dict[str, Any] = {}
    endpoint = client.meta.endpoint_url
    if not endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        is_virtual = (client.meta.config.s3 or {}).get("addressing_style") == "virtual"
        if is_virtual:
            endpoint = endpoint.replace("://", f"://{bucket}.", 1)
        config["endpoint"] = endpoint
        config["virtual_hosted_style_request"] = is_virtual
    if session.region_name is not None:
        config["region"] = session.region_name
    if os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return config, None
    if session.get_credentials() is None:
        raise PermissionError(
            errno.EACCES,
            "no AWS credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
            "AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for public data",
        )
    config["credential_provider"] = importlib.import_module(
        "obstore.auth.boto3"
    ).Boto3CredentialProvider(session)
    return config, client


def _azure_config(container: str) -> dict[str, str]:
    """Return the settings in AZURE_STORAGE_CONNECTION_STRING and in a container.

    A container may be `container@account.dfs.core.windows.net`; obstore reads the other variables
    itself.
    """
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    values: dict[str, str] = {}
    for item in text.split(";"):
        name, is_setting, value = item.partition("=")
        if is_setting:
            values[name] = value
    account, _, suffix = container.partition("@")[2].partition(".dfs.")
    if account:
        values["AccountName"] = account
    suffix = suffix or values.get("EndpointSuffix", "")
    if suffix and "AccountName" in values:
        protocol = values.get("DefaultEndpointsProtocol", "https")
        values.setdefault("BlobEndpoint", f"{protocol}://{values['AccountName']}.blob.{suffix}")
    fields = {
        "AccountName": "account_name",
        "AccountKey": "account_key",
        "SharedAccessSignature": "sas_key",
        "BlobEndpoint": "endpoint",
    }
    return {ours: values[theirs] for theirs, ours in fields.items() if theirs in values}


def _state_of(entry: Any) -> FileState:
    modified = float(entry["last_modified"].timestamp())
    return FileState(int(entry["size"]), modified, entry["e_tag"])
