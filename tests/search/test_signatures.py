"""Signed bundles: loaded where the key is trusted, refused in one line where not, unsigned once replaced."""

import json
import shutil
import sys
import threading
import time

import numpy as np
import pytest

import amips
from amips.cli import main
from amips.files import sha256
from amips.search import read_bundle
from amips.search.bundle_directory import MANIFEST
from amips.signing import SIGNATURE, new_key
from helpers import plain_build, reseal


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return {name: new_key(folder / name) for name in ("ours", "theirs")}


@pytest.fixture(scope="module")
def original(task, keys, tmp_path_factory):
    out = tmp_path_factory.mktemp("signed") / "bundle"
    plain_build(task, None, out=out, storage="flat", ids=[f"key {i}" for i in range(task.n)])
    amips.sign(out, keys["ours"][0])
    return out


@pytest.fixture
def bundle(original, tmp_path):
    return shutil.copytree(original, tmp_path / "bundle")


def files_of(bundle):
    return sorted(
        path
        for path in bundle.rglob("*")
        if path.is_file() and path.name not in (".lock", ".writer", SIGNATURE)
    )


def refused(bundle, trusted, match, **options):
    with pytest.raises(amips.BundleError, match=match) as problem:
        amips.load(bundle, trusted=trusted, **options)
    assert "\n" not in str(problem.value)


def test_a_signed_bundle_is_loaded_where_its_key_is_trusted(bundle, keys, task):
    public = keys["ours"][1]
    x = task.test.vectors.rows(0, 5)
    plain = amips.load(bundle).search(x, 3, probes=4)
    for trusted in (public, str(public), public.read_bytes(), [keys["theirs"][1], public]):
        for got, expected in zip(
            amips.load(bundle, trusted=trusted).search(x, 3, probes=4), plain, strict=True
        ):
            np.testing.assert_array_equal(got, expected)


def test_what_is_not_signed_by_a_trusted_key_is_refused(bundle, keys):
    refused(bundle, keys["theirs"][1], "not signed by a trusted key")
    (bundle / SIGNATURE).unlink()
    refused(bundle, keys["ours"][1], "is not signed")
    assert amips.load(bundle).n > 0  # it is whole, and nobody asks for more


def test_every_changed_file_is_refused_though_its_hash_is_stated_anew(bundle, keys):
    """What a forger does: change a file, state its new SHA-256, state the manifest's own digest."""
    for path in files_of(bundle):
        if path.name == MANIFEST:
            continue
        before, manifest = path.read_bytes(), (bundle / MANIFEST).read_bytes()
        path.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        # The manifest is still the one that was signed: its hashes count, also without verify.
        refused(bundle, keys["ours"][1], "SHA-256", verify=False)
        files = json.loads(manifest)["files"]
        files[str(path.relative_to(bundle))]["sha256"] = sha256(path)
        reseal(bundle / MANIFEST, files=files)
        refused(bundle, keys["ours"][1], "changed after that")
        path.write_bytes(before)
        (bundle / MANIFEST).write_bytes(manifest)
    amips.load(bundle, trusted=keys["ours"][1])


def test_the_manifest_is_refused_before_it_is_parsed(bundle, keys, monkeypatch):
    (bundle / MANIFEST).write_bytes(b"not JSON at all")
    refused(bundle, keys["ours"][1], "changed after that")


def test_the_manifest_that_is_parsed_is_the_one_that_was_checked(bundle, keys, monkeypatch):
    """Replaced between the check of its signature and what comes next: it is read once."""
    real, evil = (bundle / MANIFEST).read_bytes(), {}

    def swap(*arguments):
        check(*arguments)
        reseal(bundle / MANIFEST, target_recall=0.123)
        evil.update(json.loads((bundle / MANIFEST).read_text()))

    from amips import signing

    check = signing.check_signature
    monkeypatch.setattr(signing, "check_signature", swap)
    manifest, _, _ = read_bundle(bundle, verify=False, trusted=keys["ours"][1])
    assert evil["target_recall"] == 0.123
    assert manifest == json.loads(real)


def test_a_bundle_that_is_replaced_is_unsigned(bundle, keys):
    amips.load(bundle).save(bundle)
    assert not (bundle / SIGNATURE).exists()
    refused(bundle, keys["ours"][1], "is not signed")
    amips.sign(bundle, keys["ours"][0])
    amips.load(bundle, trusted=keys["ours"][1])


def test_the_signature_of_the_bundle_before_does_not_fit(bundle, keys):
    """A save that was killed before it cleared away, or a signature that someone put back."""
    before = (bundle / SIGNATURE).read_bytes()
    amips.load(bundle).save(bundle)
    (bundle / SIGNATURE).write_bytes(before)
    refused(bundle, keys["ours"][1], "changed after that")


def test_a_damaged_bundle_is_not_signed(bundle, keys):
    path = next(path for path in files_of(bundle) if path.name != MANIFEST)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (bundle / SIGNATURE).unlink()
    with pytest.raises(amips.BundleError, match="SHA-256"):
        amips.sign(bundle, keys["ours"][0])
    assert not (bundle / SIGNATURE).exists()
    with pytest.raises(amips.BundleError, match="not a finished bundle"):
        amips.sign(bundle / "nowhere", keys["ours"][0])
    assert not (bundle / "nowhere").exists()


def test_replacing_and_signing_at_once_never_gives_a_wrong_bundle(bundle, keys):
    """Readers who demand a signature get a bundle that was signed, or one line; never another error."""
    index, public = amips.load(bundle), keys["ours"][1]
    outcomes, wrong, done = {"loaded": 0, "refused": 0}, [], threading.Event()

    def read():
        while not done.is_set():
            try:
                amips.load(bundle, trusted=public)
                outcomes["loaded"] += 1
            except amips.BundleError as problem:
                outcomes["refused"] += 1
                if "signed" not in str(problem):
                    wrong.append(str(problem))
            except Exception as problem:
                wrong.append(repr(problem))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(8):
        index.save(bundle)
        amips.sign(bundle, keys["ours"][0])
    while not outcomes["loaded"] and not wrong:  # whatever the threads' turns were: it is signed now
        time.sleep(0.01)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    amips.load(bundle, trusted=public)


def test_verify_counts_the_files(bundle, keys):
    checked = amips.verify(bundle, keys["ours"][1])
    assert checked.files == len(files_of(bundle)) - 1
    assert not checked.texts
    assert amips.verify(bundle).signed_by == checked.signed_by
    (bundle / SIGNATURE).unlink()
    assert amips.verify(bundle).signed_by is None
    with pytest.raises(amips.BundleError, match="is not signed"):
        amips.verify(bundle, keys["ours"][1])
    path = next(path for path in files_of(bundle) if path.name != MANIFEST)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(amips.BundleError, match="SHA-256"):
        amips.verify(bundle)


class TestCommands:
    @pytest.fixture
    def run(self, tmp_path, monkeypatch, capfd):
        def call(*words):
            monkeypatch.chdir(tmp_path)
            monkeypatch.setattr(sys, "argv", ["amips", *map(str, words)])
            code = 0
            try:
                main()
            except SystemExit as ended:
                code = ended.code or 0
            return code, *capfd.readouterr()

        return call

    def test_the_way_of_a_signed_bundle(self, run, bundle, task, tmp_path):
        (bundle / SIGNATURE).unlink()
        np.save(tmp_path / "x.npy", task.test.vectors.rows(0, 2))
        code, out, _ = run("sign", "--new-key", "mine")
        assert (code, out.count("\n")) == (0, 2)
        assert run("sign", "bundle", "--key", "mine")[0] == 0
        code, out, _ = run("verify", "bundle", "--trusted", "mine.pub")
        assert (code, out.splitlines()[-1]) == (0, "signed by a trusted key")
        for words in (["search", "bundle", "x.npy", "--probes", 2], ["info", "bundle"], ["verify", "bundle"]):
            assert run(*words, "--trusted", "mine.pub")[0] == 0
        assert "check it with --trusted" in run("verify", "bundle")[1]
        run("sign", "--new-key", "other")
        for words in (["search", "bundle", "x.npy", "--probes", 2], ["info", "bundle"], ["verify", "bundle"]):
            code, out, err = run(*words, "--trusted", "other.pub")
            assert (code, out) == (1, "")
            assert "not signed by a trusted key" in err
            assert err.count("\n") == 1
            assert run(*words, "--trusted", "other.pub", "--trusted", "mine.pub")[0] == 0

    def test_one_step_makes_a_key_and_signs(self, run, bundle):
        assert run("sign", "bundle", "--new-key", "mine")[0] == 0
        assert run("verify", "bundle", "--trusted", "mine.pub")[0] == 0
        code, _, err = run("sign", "bundle", "--new-key", "mine")
        assert (code, "mine exists" in err) == (1, True)

    @pytest.mark.parametrize(
        "words", ["sign bundle", "sign --key k", "sign", "sign bundle --key a --new-key b"]
    )
    def test_half_a_command_is_a_usage_error(self, run, bundle, words):
        code, _, err = run(*words.split())
        assert code == 2
        assert "Traceback" not in err

    def test_what_is_no_bundle_is_not_signed(self, run, bundle, tmp_path):
        (tmp_path / "run").mkdir()
        assert "is not a bundle" in run("info", "run", "--trusted", "k")[2]
        assert "not a finished bundle" in run("sign", "run", "--key", "k")[2]


def test_changes_are_compacted_before_they_are_signed(bundle, keys):
    """With changes behind it, a signature could neither be used nor undone."""
    (bundle / SIGNATURE).unlink()
    with amips.load(bundle) as index:
        index.add(np.ones((1, index.d), np.float32), ["new"])
        assert amips.verify(bundle).changes == 1
        with pytest.raises(amips.BundleError, match="is being changed by another"):
            amips.sign(bundle, keys["ours"][0])
    with pytest.raises(amips.BundleError, match="compact it, then sign it"):
        amips.sign(bundle, keys["ours"][0])
    assert not (bundle / SIGNATURE).exists()
    with amips.load(bundle) as index:
        index.compact()
    amips.sign(bundle, keys["ours"][0])
    assert amips.load(bundle, trusted=keys["ours"][1]).n == index.n
    assert amips.verify(bundle).changes == 0


def test_verify_looks_at_the_changes_too(bundle, keys, monkeypatch, capsys):
    (bundle / SIGNATURE).unlink()
    with amips.load(bundle) as index:
        index.remove(["key 1"])
        index.remove(["key 2"])
    monkeypatch.setattr(sys, "argv", ["amips", "verify", str(bundle)])
    main()
    assert "2 changes since" in capsys.readouterr().out
    (changes,) = bundle.glob("changes-*")
    content = bytearray(changes.read_bytes())
    content[60] ^= 255
    changes.write_bytes(content)
    with pytest.raises(amips.BundleError, match="record 1 is damaged"):
        amips.verify(bundle)
