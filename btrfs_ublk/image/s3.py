"""S3 buckets: their listings, and image layouts below s3://BUCKET/PREFIX/.

Of layouts, endpoint, region and keys are those that other S3 clients take from the
environment, as AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE; see s3_keys().
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from btrfs_ublk.content import SourceKeys
from btrfs_ublk.content.s3 import s3_keys
from btrfs_ublk.errors import BtrfsUblkError, UsageError
from btrfs_ublk.image.access import RegistryAccess, RegistryError
from btrfs_ublk.image.documents import MAX_DOCUMENT_BYTES, Descriptor, InvalidImageError
from btrfs_ublk.image.reference import Reference
from btrfs_ublk.image.repository import COPY_BYTES, Progress
from btrfs_ublk.image.transport import NoAnswer

try:
    # They have no types: their classes are made when they run.
    boto3: Any = import_module("boto3")
    transfer: Any = import_module("boto3.s3.transfer")
    botocore: Any = import_module("botocore.session")
    Config: Any = import_module("botocore.config").Config
    UNSIGNED: Any = import_module("botocore").UNSIGNED
    exceptions: Any = import_module("botocore.exceptions")
except ImportError as missing:
    raise UsageError(
        f"S3 buckets need the Python package {missing.name}",
        hint="pip install 'btrfs-ublk[s3]'",
    ) from missing
BotoCoreError: Any = exceptions.BotoCoreError
ClientError: Any = exceptions.ClientError

_REGION = "us-east-1"
#: Of a large blob. A store takes at most 10,000 parts of an object, so it is more where
#: the blob has more than 160 GiB; boto3 sees to it.
_PART_BYTES = 16 << 20
_PARTS_AT_ONCE = 4
_TRIES = 5
_TIMEOUT_S = (10.0, 60.0)
_MISSING = ("404", "NoSuchKey", "NotFound")
#: Answers to a condition that does not hold any more.
_CHANGED = ("412", "PreconditionFailed", "409", "ConditionalRequestConflict")


class Bucket:
    """Requests about a bucket, which ``place`` names in errors. ``keys`` are those of a
    source of the kind s3."""

    def __init__(self, place: str, keys: SourceKeys) -> None:
        self.place = place
        path_style = keys.get("path_style", "endpoint" in keys)
        config = Config(
            connect_timeout=_TIMEOUT_S[0],
            read_timeout=_TIMEOUT_S[1],
            retries={"total_max_attempts": _TRIES, "mode": "standard"},
            s3={"addressing_style": "path"} if path_style else {},
            # Others than Amazon's do not know checksums behind the body.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            signature_version=UNSIGNED if keys.get("anonymous") else None,
        )
        with self._beginning():
            self._client: Any = self._session(keys).client(
                "s3",
                region_name=keys.get("region", _REGION),
                endpoint_url=keys.get("endpoint"),
                verify=keys.get("ca_file"),
                config=config,
            )

    def _session(self, keys: SourceKeys) -> Any:
        file, profile = keys.get("credentials_file"), keys.get("profile")
        found = botocore.get_session()
        if file or profile:
            # NB: with a profile, keys of the environment do not count.
            found.set_config_variable("profile", profile or "default")
        if file:
            found.set_config_variable("credentials_file", file)
        return boto3.session.Session(botocore_session=found)

    def close(self) -> None:
        self._client.close()

    def pages(self, bucket: str, prefix: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the objects below a prefix, a page of them per request."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=bucket, Prefix=prefix
        )
        with self._asking("list it"):
            try:
                for page in pages:
                    yield page.get("Contents", [])
            except (KeyError, ValueError) as error:  # no key, number or time
                raise RegistryError(f"{self.place} is no listing: {error}") from error

    @contextmanager
    def _beginning(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ValueError, OSError) as error:
            raise UsageError(
                f"{self.place}: the settings of S3 clients are not valid: {error}",
                hint="AWS_ENDPOINT_URL is like https://HOST:PORT; see AWS_REGION, "
                "AWS_PROFILE and the files of keys and settings",
            ) from error

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        try:
            yield
        except exceptions.NoCredentialsError as error:
            raise UsageError(
                f"there are no keys for {self.place}",
                hint="set AWS_SHARED_CREDENTIALS_FILE, or AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY; an open bucket is read by its https URL",
            ) from error
        except ClientError as error:
            raise self._refused(what, error) from error
        except exceptions.HTTPClientError as error:
            if isinstance(error.kwargs.get("error"), ValueError):
                # NB: its text has the header, with the token.
                raise UsageError(
                    f"{self.place}: the keys have characters that no header can have",
                    hint="is there a newline in AWS_SESSION_TOKEN, or in a key?",
                ) from None
            raise self._unanswered(what, error) from error
        except BotoCoreError as error:
            raise self._unanswered(what, error) from error

    def _unanswered(self, what: str, error: Exception) -> RegistryError:
        return RegistryError(
            f"{self.place}: cannot {what}: {error}",
            hint="is the store there, and AWS_ENDPOINT_URL right?",
        )

    def _refused(self, what: str, error: ClientError) -> RegistryError:
        answer = error.response
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = answer.get("Error", {}).get("Code", "")
        message = answer.get("Error", {}).get("Message", "")
        hint = None
        if code == "NoSuchBucket":
            hint = "make the bucket, or name another one"
        elif status == 501:
            hint = "the store has no conditional writes (If-Match): use another one"
        elif status in (401, 403):
            hint = (
                "the keys have expired, are wrong, or may not do this (a missing "
                "object is refused so to who may not list the bucket): see "
                "AWS_SHARED_CREDENTIALS_FILE, AWS_PROFILE, AWS_ACCESS_KEY_ID"
            )
        return RegistryError(
            f"{self.place}: cannot {what}: HTTP {status}: {code} {message}".rstrip(),
            hint=hint,
            status=status,
        )


class S3Files(Bucket):
    """The files of a layout, below a prefix of a bucket."""

    def __init__(self, reference: Reference, access: RegistryAccess) -> None:
        keys = s3_keys()
        keys.pop("credentials_file", None)  # boto3 finds it by itself
        keys.pop("profile", None)
        if access.ca_file:
            keys["ca_file"] = str(access.ca_file)
        super().__init__(reference.place, keys)
        self._bucket = reference.bucket
        self._prefix = reference.repository

    def _ask(
        self,
        what: str,
        call: Callable[..., Any],
        name: str,
        none_for: Collection[str] = (),
        **keys: Any,
    ) -> Any:
        """Return what a call says about an object; None where it refuses with one of
        these codes."""
        with self._asking(what):
            try:
                return call(Bucket=self._bucket, Key=f"{self._prefix}/{name}", **keys)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in none_for:
                    return None
                raise

    def read(self, name: str) -> tuple[bytes, str | None] | None:
        """Return a document, and what the store knows this content by (ETag); None
        where there is none."""
        found = self._ask(f"get {name}", self._client.get_object, name, _MISSING)
        if found is None:
            return None
        with self._asking(f"get {name}"), closing(found["Body"]) as body:
            data = body.read(MAX_DOCUMENT_BYTES + 1)
        if len(data) > MAX_DOCUMENT_BYTES:
            raise InvalidImageError(
                f"{self.place}/{name} has more than {MAX_DOCUMENT_BYTES} bytes"
            )
        return data, found.get("ETag")

    def has(self, name: str) -> bool:
        ask = self._client.head_object
        return self._ask(f"look for {name}", ask, name, _MISSING) is not None

    def rest(self, name: str, one: Descriptor, done: int) -> Iterator[bytes]:
        """As Repository._rest()."""
        what, ask = f"get the blob {one.digest}", self._client.get_object
        found = self._ask(what, ask, name, Range=f"bytes={done}-")
        expected = f"bytes {done}-{one.size - 1}/{one.size}"
        if done and found.get("ContentRange") != expected:
            raise RegistryError(
                f"{self.place} answers for {expected} of blob {one.digest} with "
                f"{found.get('ContentRange')!r}"
            )
        count = 0
        try:
            with closing(found["Body"]) as body:
                for part in body.iter_chunks(COPY_BYTES):
                    count += len(part)
                    yield part
        except BotoCoreError as error:
            raise NoAnswer(str(error)) from error
        if not count:
            raise NoAnswer("the store sent nothing")

    def write(self, name: str, data: bytes) -> None:
        """Write a small file, as a whole."""
        self._ask(f"put {name}", self._client.put_object, name, Body=data)

    def replace(self, name: str, data: bytes, version: str | None) -> bool:
        """Write a file if it still has the version that the caller has seen; None: if
        there is none. Returns whether it was written."""
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        put = self._client.put_object
        done = self._ask(f"put {name}", put, name, _CHANGED, Body=data, **condition)
        return done is not None

    def upload(self, name: str, path: Path, progress: Progress) -> None:
        """Write a large file, as a whole, in pieces."""
        config = transfer.TransferConfig(
            multipart_threshold=_PART_BYTES,
            multipart_chunksize=_PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE,
        )
        try:
            with open(path, "rb") as file:
                send = partial(self._client.upload_fileobj, file)
                what = f"upload {name}"
                self._ask(what, send, name, Config=config, Callback=progress)
        except OSError as error:
            why = error.strerror or str(error)
            raise BtrfsUblkError(f"cannot read {path}: {why}") from error
