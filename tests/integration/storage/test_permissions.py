"""The permissions that the documentation lists for S3, against a simulation of IAM: they suffice,
and `distckpt bench` names each that is missing.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from pathlib import Path

import boto3
import pytest
import torch

import distckpt
from distckpt import CheckpointManager, ShardedTensor
from tests.support.cli_command import call, call_error
from tests.support.large_states import holds, large_state
from tests.support.s3_server import (
    CREDENTIALS,
    Fault,
    FaultyProxy,
    keys_in,
    reached_at,
    uploads_in,
)

DOCUMENT = Path(__file__).parents[3] / "docs" / "object-storage.md"
SECTION = DOCUMENT.read_text().partition("\n## Permissions\n")[2].partition("\n## ")[0]
ROWS = [row for row in SECTION.splitlines() if "`s3:" in row and row.startswith("| ")]
READ, WRITE, CLEAR_UP = (re.findall(r"`(s3:\w+)`", row) for row in ROWS)
ALL = [*READ, *WRITE, *CLEAR_UP]
FEW_ATTEMPTS = {"AWS_MAX_ATTEMPTS": "2"}


@contextlib.contextmanager
def allowed(server, actions):
    """Let this process be a user who may do nothing else."""
    # Imported here: moto takes seconds.
    from moto.core import enable_iam_authentication

    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    iam = boto3.client("iam", endpoint_url=server, region_name="us-east-1", **keys)
    user = f"user-{secrets.token_hex(8)}"
    iam.create_user(UserName=user)
    statement = {"Effect": "Allow", "Action": actions, "Resource": "*"}
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    iam.put_user_policy(UserName=user, PolicyName="policy", PolicyDocument=policy)
    key = iam.create_access_key(UserName=user)["AccessKey"]
    credentials = {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }
    settings = {**CREDENTIALS, **credentials, **FEW_ATTEMPTS}
    with enable_iam_authentication(), reached_at(server, **settings):
        yield


def small_state(step):
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(8)), "step": step}


def test_reading(server, bucket, tmp_path):
    distckpt.save(large_state(1), f"{bucket}/c")
    with allowed(server, READ):
        assert holds(f"{bucket}/c", 1)
        assert distckpt.verify(f"{bucket}/c").is_whole
        distckpt.consolidate(f"{bucket}/c", tmp_path / "hf")
        with pytest.raises(distckpt.CheckpointNotFoundError):
            distckpt.load({}, f"{bucket}/none")
        with pytest.raises(PermissionError):
            distckpt.save(small_state(1), f"{bucket}/d")
    assert keys_in(server, f"{bucket}/d") == []


def test_writing(server, bucket):
    with allowed(server, [*READ, *WRITE]):
        distckpt.save(large_state(1), f"{bucket}/c")
        distckpt.async_save(large_state(2), f"{bucket}/d").result()
        distckpt.consolidate(f"{bucket}/c", f"{bucket}/hf")
        assert holds(f"{bucket}/c", 1)
        assert holds(f"{bucket}/d", 2)


def replace_and_clear_up(bucket):
    for seed in (1, 2):
        distckpt.save(small_state(seed), f"{bucket}/c", overwrite=seed == 2)
    with CheckpointManager(f"{bucket}/run", keep_last=1, async_save=False) as manager:
        for step in (1, 2):
            manager.save(step, small_state(step))
        assert manager.load(small_state(0))["step"] == 2
        return manager.not_removed


def test_replacing_and_clearing_up(server, bucket, caplog):
    with allowed(server, ALL):
        assert replace_and_clear_up(bucket) == {}
    assert caplog.records == []
    assert keys_in(server, f"{bucket}/run/step_00000001") == []
    assert len(keys_in(server, f"{bucket}/c")) == 4


def test_housekeeping_that_is_not_allowed_fails_no_save(server, bucket, caplog):
    with allowed(server, [*READ, *WRITE]):
        assert list(replace_and_clear_up(bucket)) == [1]
    assert "s3:ListBucketMultipartUploads" in caplog.text
    assert "could not remove what the checkpoint" in caplog.text
    request = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(8))}
    assert distckpt.load(request, f"{bucket}/c")["step"] == 2


@pytest.mark.parametrize("missing", [*READ, *WRITE])
def test_each_of_them_is_needed(server, bucket, missing):
    others = [action for action in [*READ, *WRITE] if action != missing]
    with allowed(server, others), pytest.raises(PermissionError):
        distckpt.save(small_state(1), f"{bucket}/c")


def test_a_broken_off_upload_that_may_not_be_aborted_reports_what_broke_it_off(server, bucket):
    distckpt.save(large_state(1), f"{bucket}/c")
    shard = next(key for key in keys_in(server, bucket) if "shard" in key)
    damage(server, bucket, shard)
    with allowed(server, [*READ, *WRITE]), pytest.raises(distckpt.CorruptCheckpointError):
        distckpt.consolidate(f"{bucket}/c", f"{bucket}/hf")
    assert uploads_in(server, bucket) == ["hf/model.safetensors"]


def damage(server, bucket, key):
    with reached_at(server):
        s3 = boto3.client("s3")
        content = bytearray(s3.get_object(Bucket=bucket[5:], Key=key)["Body"].read())
        content[-1] ^= 1
        s3.put_object(Bucket=bucket[5:], Key=key, Body=bytes(content))


# --- distckpt bench -------------------------------------------------------------------------------


def test_bench_tries_them(server, bucket, capsys):
    with allowed(server, ALL):
        assert "can be written to" in call(capsys, "bench", f"{bucket}/run", "--gb", "0")
    assert keys_in(server, bucket) == uploads_in(server, bucket) == []


@pytest.mark.parametrize("missing", [*READ, *WRITE, "s3:DeleteObject"])
def test_bench_names_one_that_is_missing(server, bucket, missing, capsys):
    with allowed(server, [action for action in ALL if action != missing]):
        error = call_error(capsys, "bench", f"{bucket}/run", "--gb", "0.001")
    assert f"Allow {missing} there." in error


@pytest.mark.parametrize("missing", ["s3:AbortMultipartUpload", "s3:ListBucketMultipartUploads"])
def test_bench_warns_of_uploads_that_stay(server, bucket, missing, capsys, caplog):
    with allowed(server, [action for action in ALL if action != missing]):
        call(capsys, "bench", f"{bucket}/run", "--gb", "0")
    assert f"allow {missing}" in caplog.text


class IgnoringProxy(FaultyProxy):
    """Accepts conditions, and ignores them."""

    def forward(self, method, path, headers, body):
        conditions = ("if-none-match", "if-match")
        others = {name: value for name, value in headers.items() if name.lower() not in conditions}
        return super().forward(method, path, others, body)


REFUSED = Fault("PUT", "", "501", count=1000, header="If-None-Match")


@pytest.mark.parametrize(
    ("proxy", "text"),
    [
        (lambda server: IgnoringProxy(server), "conditional writes that it accepts and ignores"),
        (lambda server: FaultyProxy(server, REFUSED), "no conditional writes"),
    ],
)
def test_bench_warns_of_a_store_without_conditions(server, bucket, proxy, text, capsys, caplog):
    with proxy(server).running() as url, reached_at(url, **FEW_ATTEMPTS):
        call(capsys, "bench", f"{bucket}/run", "--gb", "0")
    assert f"{bucket}/run has {text}: nothing keeps" in caplog.text
