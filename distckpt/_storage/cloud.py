"""S3, Google Cloud Storage and Azure through obstore, which repeats requests whose failure may be temporary.

boto3 finds the credentials, region and endpoint of S3 as all AWS tools do, and lists unfinished multipart uploads,
which obstore cannot.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import http
import importlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from distckpt._base.memory import Bytes
from distckpt._storage.fsspec_urls import settings_of
from distckpt._storage.remote import PART_BYTES, RemoteLocation, Upload, fill, too_large

_PROVIDERS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure"}
CLOUD_SCHEMES = frozenset(_PROVIDERS)

_MAX_PARTS = 10_000
_ATTEMPTS = 8
"""Of a request, unless AWS_MAX_ATTEMPTS says otherwise."""
_FIRST_DELAY = 0.1
"""Seconds before the second attempt, twice as long before each further one."""
_RETRY_SECONDS = 180
"""After which a request is not repeated any more."""
_REQUEST_SECONDS = 120
_BEYOND_THE_END = 416
_TEMPORARY_STATUSES = (408, 429, 500, 502, 503, 504)
_ERRNOS = {401: errno.EACCES, 403: errno.EACCES, 501: errno.ENOSYS}
"""HTTP status -> what it means for a file; EIO for others."""


class CloudLocation(RemoteLocation):
    """An object, or a prefix of objects, of S3, Google Cloud Storage or Azure."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        scheme, _, rest = location.partition("://")
        container, _, self._path = rest.partition("/")
        self._connection = _connect(location, scheme, container)
        self._store = self._connection.store

    def kind(self) -> Literal["file", "directory"] | None:
        if self._path and self._head() is not None:
            return "file"
        return "directory" if self._request(lambda: next(self._store.list(self._path, chunk_size=1), ())) else None

    def list_names(self) -> list[str]:
        found = self._request(lambda: self._store.list_with_delimiter(self._path))
        names = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        if not names:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.location)
        return sorted(name.rstrip("/").rpartition("/")[2] for name in names)

    def list_files(self) -> list[str]:
        entries = self._request(lambda: self._store.list(self._path).collect())
        start = f"{self._path}/" if self._path else ""
        return sorted(entry["path"][len(start) :] for entry in entries)

    def size(self) -> int:
        return int(self._request(lambda: self._store.head(self._path))["size"])

    def read(self, max_bytes: int | None = None) -> bytes:
        def fetch() -> Any:
            answer = self._store.get(self._path)
            if max_bytes is not None and answer.meta["size"] > max_bytes:
                raise too_large(max_bytes, self.location)
            return answer.bytes()

        return bytes(self._request(fetch))

    def read_into(self, start: int, buffers: Sequence[Bytes]) -> int:
        wanted = sum(len(buffer) for buffer in buffers)

        def fetch() -> int:
            try:
                return fill(buffers, self._store.get_range(self._path, start=start, length=wanted))
            except self._errors.BaseError as error:
                if _status_of(error) == _BEYOND_THE_END:
                    return 0
                raise

        return self._request(fetch) if wanted else 0

    def write(self, data: bytes) -> None:
        self._request(lambda: self._store.put(self._path, data, chunk_size=PART_BYTES))

    def write_stream(self, content: Callable[[], Iterable[bytes]], num_bytes: int, num_requests: int) -> None:
        options = {"chunk_size": max(PART_BYTES, -(-num_bytes // _MAX_PARTS)), "max_concurrency": num_requests}
        try:
            # obstore aborts the upload when a part, or the content, fails.
            self._request(lambda: self._store.put(self._path, iter(content()), use_multipart=True, **options))
        except FileNotFoundError as error:
            # The upload is gone: completed by an attempt whose answer was lost, if the object is there.
            is_ours = error.filename == self.location
            if not is_ours or (head := self._head()) is None or head["size"] != num_bytes:
                raise

    def open_for_writing(self) -> Any:
        return _Writer(self, self._connection.obstore.open_writer(self._store, self._path, buffer_size=PART_BYTES))

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda: self._store.delete(self._path))

    def version(self) -> Any:
        head = self._head()
        return head and {name: head[name] for name in ("e_tag", "version") if head[name] is not None}

    def _put_if(self, known_version: Any, data: bytes) -> bool:
        mode = "create" if known_version is None else known_version
        try:
            self._request(lambda: self._connection.unrepeated.put(self._path, data, mode=mode))
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError, FileNotFoundError):
            return False
        return True

    def list_uploads(self) -> list[Upload]:
        client, bucket = self._connection.s3_client, self._connection.bucket
        if client is None:
            return []
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=self._path)
        found = self._request(lambda: [item for page in pages for item in page.get("Uploads", [])])
        below = f"{self._path}/" if self._path else ""
        return [
            Upload(self.location + item["Key"].removeprefix(self._path), item["UploadId"])
            for item in found
            if item["Key"] == self._path or item["Key"].startswith(below)
        ]

    def abort(self, upload: Upload) -> None:
        client, bucket = self._connection.s3_client, self._connection.bucket
        key = upload.location.partition("://")[2].partition("/")[2]
        with contextlib.suppress(FileNotFoundError):
            self._request(lambda: client.abort_multipart_upload(Bucket=bucket, Key=key, UploadId=upload.id))

    @property
    def _errors(self) -> Any:
        return self._connection.obstore.exceptions

    def _head(self) -> Any:
        """Return the metadata of the object, None when there is none."""
        try:
            return self._request(lambda: self._store.head(self._path))
        except FileNotFoundError:
            return None

    def _request(self, make: Callable[[], Any]) -> Any:
        """Make a request, again when it has failed in a way that obstore does not repeat.

        These are answers that were cut off while they were read, other than those of GET, and all conditional puts:
        obstore would repeat what a store has not implemented as well.
        """
        with self._translated_errors():
            for attempt in range(1, _num_attempts() + 1):
                try:
                    return make()
                except Exception as error:
                    if attempt == _num_attempts() or not _is_worth_repeating(error):
                        raise
                time.sleep(_FIRST_DELAY * 2 ** (attempt - 1))

    @contextlib.contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Turn errors of the libraries into OSErrors that name the location, but for those of conditions."""
        try:
            yield
        except FileNotFoundError as error:
            if error.errno is not None:
                raise
            raise FileNotFoundError(errno.ENOENT, _text_of(error), self.location) from error
        except (self._errors.AlreadyExistsError, self._errors.PreconditionError):
            raise
        except Exception as error:
            if not _is_of_library(error):
                raise
            status = _status_of(error)
            if status == http.HTTPStatus.NOT_FOUND:
                raise FileNotFoundError(errno.ENOENT, _text_of(error), self.location) from error
            raise OSError(_ERRNOS.get(status, errno.EIO), _text_of(error), self.location) from error


class _Writer:
    """An object that is written in one stream."""

    def __init__(self, location: CloudLocation, file: Any) -> None:
        self._location, self._file = location, file

    def write(self, data: bytes | memoryview) -> None:
        with self._location._translated_errors():
            self._file.write(data)

    def close(self) -> None:
        with self._location._translated_errors():
            self._file.close()


# --- Connections ------------------------------------------------------------------------------------------------------


class _Connection(NamedTuple):
    obstore: Any
    store: Any
    unrepeated: Any
    """The same store, with requests made once."""
    bucket: str
    s3_client: Any
    """boto3's; None for other stores, and where nothing is signed."""


def _connect(location: str, scheme: str, container: str) -> _Connection:
    environment = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_VARIABLES)))
    try:
        return _cached_connection(scheme, container, environment, repr(settings_of(scheme)))
    except ImportError as error:
        raise ImportError(f"{location}: {error}: pip install 'distckpt[{_PROVIDERS[scheme]}]'") from error
    except Exception as error:
        raise OSError(errno.EINVAL, f"{type(error).__name__}: {_text_of(error)}", location) from error


_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_", "STORAGE_EMULATOR_HOST", "HOME")
"""Connections are made anew when these have changed."""


@functools.lru_cache(maxsize=64)
def _cached_connection(scheme: str, container: str, environment: Any, settings: str) -> _Connection:
    obstore, stores = importlib.import_module("obstore"), importlib.import_module("obstore.store")
    provider, client = _PROVIDERS[scheme], None
    if provider == "s3":
        config, client = _s3_config(container)
        connect = functools.partial(stores.S3Store, container, **config)
    elif settings_of(scheme):
        raise ValueError(
            f"fsspec.config.conf[{scheme!r}] is not read: configure {scheme}:// through the environment, see "
            "docs/object-storage.md"
        )
    elif provider == "gcs":
        emulator = os.environ.get("STORAGE_EMULATOR_HOST")
        config = {"base_url": emulator, "credential_provider": lambda: _NO_TOKEN} if emulator else {}
        connect = functools.partial(stores.GCSStore, container, **config)
    else:
        config = _azure_config(container)
        connect = functools.partial(stores.AzureStore, container.partition("@")[0], **config)

    def store(num_attempts: int) -> Any:
        return connect(
            client_options={"timeout": timedelta(seconds=_REQUEST_SECONDS), "allow_http": True},
            retry_config={"max_retries": num_attempts - 1, "retry_timeout": timedelta(seconds=_RETRY_SECONDS)},
        )

    return _Connection(obstore, store(_num_attempts()), store(1), container, client)


_NO_TOKEN = {"token": "none", "expires_at": None}


def _num_attempts() -> int:
    return int(os.environ.get("AWS_MAX_ATTEMPTS", _ATTEMPTS))


def _s3_config(bucket: str) -> tuple[dict[str, Any], Any]:
    """Return obstore's configuration of S3 and boto3's client.

    Raises:
        ValueError: a setting of s3fs in `fsspec.config.conf` has no counterpart here.
    """
    settings = dict(settings_of("s3"))
    anonymous = settings.pop("anon", False) or os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true")
    extra = dict(settings.pop("s3_additional_kwargs", {}))
    config = {ours: extra.pop(theirs) for theirs, ours in _ENCRYPTION.items() if theirs in extra}
    client_settings = dict(settings.pop("client_kwargs", {}))
    if "endpoint_url" in settings:
        client_settings["endpoint_url"] = settings.pop("endpoint_url")
    session_settings = {ours: settings.pop(theirs) for theirs, ours in _SESSION.items() if theirs in settings}
    for name in _OBSOLETE:
        settings.pop(name, None)
    if unknown := [*settings, *extra]:
        raise ValueError(
            f"fsspec.config.conf['s3'] has settings that are not known here: {', '.join(sorted(unknown))}. S3 is "
            "reached through obstore and configured through the environment, see docs/object-storage.md"
        )
    session = importlib.import_module("boto3").session.Session(**session_settings)
    client = session.client("s3", **client_settings)
    if client.meta.region_name not in (None, "aws-global"):
        config["region"] = client.meta.region_name
    endpoint = client.meta.endpoint_url
    if not endpoint.endswith((".amazonaws.com", ".amazonaws.com.cn")):
        is_virtual = (client.meta.config.s3 or {}).get("addressing_style") == "virtual"
        config["endpoint"] = endpoint.replace("://", f"://{bucket}.", 1) if is_virtual else endpoint
        config["virtual_hosted_style_request"] = is_virtual
    if anonymous:
        return {**config, "skip_signature": True}, None
    if session.get_credentials() is None:
        raise PermissionError(
            "no AWS credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or "
            "AWS_SKIP_SIGNATURE=true for public data"
        )
    config["credential_provider"] = importlib.import_module("obstore.auth.boto3").Boto3CredentialProvider(session)
    return config, client


_SESSION = {"key": "aws_access_key_id", "secret": "aws_secret_access_key", "token": "aws_session_token",
            "profile": "profile_name"}  # fmt: skip
"""Setting of s3fs -> argument of boto3's session."""
_ENCRYPTION = {"ServerSideEncryption": "server_side_encryption", "SSEKMSKeyId": "sse_kms_key_id",
               "BucketKeyEnabled": "sse_bucket_key_enabled"}  # fmt: skip
"""The same for settings of obstore."""
_OBSOLETE = ("fixed_upload_size", "default_block_size", "default_cache_type", "default_fill_cache",
             "use_listings_cache", "max_concurrency", "asynchronous", "cache_regions")  # fmt: skip
"""Settings of s3fs that make no difference here: parts always have equal sizes, nothing is cached."""


def _azure_config(container: str) -> dict[str, str]:
    """Return what AZURE_STORAGE_CONNECTION_STRING and `container@account.dfs.core.windows.net` say.

    obstore reads the other variables itself.
    """
    text = os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    values = dict(item.split("=", 1) for item in text.split(";") if "=" in item)
    account, _, suffix = container.partition("@")[2].partition(".dfs.")
    if account:
        values["AccountName"] = account
    suffix = suffix or values.get("EndpointSuffix", "")
    if suffix and "AccountName" in values:
        protocol = values.get("DefaultEndpointsProtocol", "https")
        values.setdefault("BlobEndpoint", f"{protocol}://{values['AccountName']}.blob.{suffix}")
    return {ours: values[theirs] for theirs, ours in _AZURE.items() if theirs in values}


_AZURE = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key",
          "BlobEndpoint": "endpoint"}  # fmt: skip
"""Field of a connection string -> setting of obstore."""


# --- Errors -----------------------------------------------------------------------------------------------------------


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an answer, 0 when there was none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    # obstore gives it in its message only.
    match = re.search(r"status code: (\d{3})", str(error))
    return int(match[1]) if match else 0


def _is_of_library(error: Exception) -> bool:
    return any(kind.__module__.partition(".")[0] in ("obstore", "botocore") for kind in type(error).__mro__)


def _is_worth_repeating(error: Exception) -> bool:
    """Tell whether a failure may be temporary, and was not repeated by the library."""
    status = _status_of(error)
    is_temporary = _is_of_library(error) and (status == 0 or status in _TEMPORARY_STATUSES)
    return is_temporary and not re.search(r"after \d+ retries|reached max retries", str(error))


def _text_of(error: Exception) -> str:
    """Return what an error says, without obstore's dump of the values inside."""
    return str(error).partition("\n\nDebug source:")[0]
