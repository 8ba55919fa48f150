"""Keys and signatures: made, kept from others, checked; everything else is one line."""

import hashlib
import json
import os
import stat
import subprocess
import sys

import pytest

from amips.errors import AmipsError, BundleError
from amips.signing import SIGNATURE, approval, new_key, read_signature, write_signature

DATA = b'{"kind": "bundle"}\n'


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return {name: new_key(folder / name) for name in ("ours", "theirs")}


@pytest.fixture
def signed(keys, tmp_path):
    write_signature(tmp_path, keys["ours"][0], {"manifest.json": DATA}, BundleError)
    return tmp_path


def refused(directory, data, trusted, name="manifest.json"):
    with pytest.raises(BundleError) as problem:
        approval(directory, name, trusted, BundleError)(data)
    assert "\n" not in str(problem.value)
    return str(problem.value)


def test_files_of_two_signed_directories_cannot_be_mixed(keys, tmp_path):
    contents = [{"manifest.json": DATA, "text.json": text} for text in (b"one", b"two")]
    for name, files in zip("ab", contents, strict=True):
        (tmp_path / name).mkdir()
        write_signature(tmp_path / name, keys["ours"][0], files, BundleError)
        for file, data in files.items():
            approval(tmp_path / name, file, keys["ours"][1], BundleError)(data)
    assert "changed after that" in refused(tmp_path / "a", b"two", keys["ours"][1], "text.json")
    one, two = (json.loads((tmp_path / name / SIGNATURE).read_text()) for name in "ab")
    one["files"]["text.json"] = two["files"]["text.json"]
    (tmp_path / "a" / SIGNATURE).write_text(json.dumps(one))
    assert "not signed by a trusted key" in refused(tmp_path / "a", b"two", keys["ours"][1], "text.json")


def test_a_name_cannot_stand_for_two(keys, signed):
    stated = json.loads((signed / SIGNATURE).read_text())
    ((name, digest),) = stated["files"].items()
    stated["files"] = {f"{name}\n{digest}  text.json": digest}
    (signed / SIGNATURE).write_text(json.dumps(stated))
    assert "is damaged" in refused(signed, DATA, keys["ours"][1])


def test_a_new_key_is_for_its_owner_alone(keys):
    private, public = keys["ours"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert public.name == "ours.pub"
    assert private.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert public.read_bytes().startswith(b"-----BEGIN PUBLIC KEY-----")
    assert keys["theirs"][0].read_bytes() != private.read_bytes()


def test_a_key_that_is_there_is_never_replaced(keys, tmp_path):
    before = keys["ours"][0].read_bytes()
    with pytest.raises(AmipsError, match="ours exists"):
        new_key(keys["ours"][0])
    assert keys["ours"][0].read_bytes() == before
    (tmp_path / "k.pub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AmipsError, match=r"k\.pub exists"):
        new_key(tmp_path / "k")
    assert not (tmp_path / "k").exists()
    assert not (tmp_path / "elsewhere").exists()


def test_signed_by_a_trusted_key(signed, keys):
    public = keys["ours"][1]
    for trusted in (
        public,
        str(public),
        public.read_bytes(),
        [public],
        (keys["theirs"][1], public.read_bytes()),
    ):
        approval(signed, "manifest.json", trusted, BundleError)(DATA)
    assert approval(signed, "manifest.json", None, BundleError) is None


def test_the_signature_is_of_one_statement(signed, keys):
    """Any program that knows Ed25519 can check it."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    stated = read_signature(signed, BundleError)
    public = load_pem_public_key(keys["ours"][1].read_bytes())
    digest = hashlib.sha256(DATA).hexdigest()
    public.verify(stated.signature, f"amips signature 2\n{digest}  manifest.json\n".encode())
    assert stated.key == public.public_bytes_raw().hex()


def test_what_is_refused(signed, keys, tmp_path_factory):
    ours, theirs = keys["ours"][1], keys["theirs"][1]
    for changed in (DATA + b" ", DATA[:-1], b"", DATA.replace(b"b", b"c")):
        assert "changed after that" in refused(signed, changed, ours)
        stated = json.loads((signed / SIGNATURE).read_text())
        stated["files"]["manifest.json"] = hashlib.sha256(changed).hexdigest()
        forged = tmp_path_factory.mktemp("forged")
        (forged / SIGNATURE).write_text(json.dumps(stated))
        assert "not signed by a trusted key" in refused(forged, changed, ours)
    assert "not signed by a trusted key" in refused(signed, DATA, theirs)
    assert "came after the signature" in refused(signed, DATA, ours, "text.json")
    (signed / SIGNATURE).unlink()
    assert "is not signed" in refused(signed, DATA, ours)


def test_the_key_that_a_signature_names_is_not_believed(signed, keys):
    """Signed by another, who writes our public key into the file."""
    ours = read_signature(signed, BundleError).key
    write_signature(signed, keys["theirs"][0], {"manifest.json": DATA}, BundleError)
    stated = json.loads((signed / SIGNATURE).read_text())
    (signed / SIGNATURE).write_text(json.dumps({**stated, "key": ours}))
    assert "not signed by a trusted key" in refused(signed, DATA, keys["ours"][1])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"kind": "signature", "format": 1}',
        b'{"kind": "signature", "format": 2}',
        b'{"kind": "signature", "format": 2, "key": "zz", "files": {}, "signature": "ab"}',
        b'{"kind": "signature", "format": 2, "key": "aa", "files": [], "signature": "ab"}',
        b'{"kind": "signature", "format": 2, "key": "aa", "files": [1], "signature": "ab"}',
        b'{"kind": "signature", "format": 2, "key": "aa", "files": {"manifest.json": 5}, "signature": "ab"}',
        b'{"kind": "signature", "format": 2, "key": "aa", "files": {}, "signature": {}}',
        b'{"kind": "signature", "format": 2, "key": "aa", "files": {}, "signature": "ab"}',
        b'{"kind": "signature", "format": 2, "key": 7, "files": {}, "signature": "ab"}',
        b"[" * 100_000,
        b" " * (1 << 20),
    ],
)
def test_a_damaged_signature(signed, keys, content):
    (signed / SIGNATURE).write_bytes(content)
    refused(signed, DATA, keys["ours"][1])


def test_a_pipe_and_a_link_as_signature(signed, keys, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "signature.json"
    (signed / SIGNATURE).rename(elsewhere)
    (signed / SIGNATURE).symlink_to(elsewhere)
    assert "outside" in refused(signed, DATA, keys["ours"][1])
    (signed / SIGNATURE).unlink()
    os.mkfifo(signed / SIGNATURE)
    assert "not a regular file" in refused(signed, DATA, keys["ours"][1])


def test_keys_that_are_none(signed, keys, tmp_path):
    private, public = keys["ours"]
    assert "is not a public key" in refused(signed, DATA, private)
    assert "is not a public key" in refused(signed, DATA, b"nonsense")
    assert "does not exist" in refused(signed, DATA, tmp_path / "none")
    assert "trusted is empty" in refused(signed, DATA, [])
    assert "got int" in refused(signed, DATA, [5])
    for key in (public, b"nonsense"):
        with pytest.raises(BundleError, match="is not a private key"):
            write_signature(signed, key, {}, BundleError)


def test_keys_of_another_kind(signed, tmp_path):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    private = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    locked = key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"word"))
    assert "of another kind than Ed25519" in refused(signed, DATA, public)
    with pytest.raises(BundleError, match="of another kind than Ed25519"):
        write_signature(signed, private, {}, BundleError)
    with pytest.raises(BundleError, match="has a password"):
        write_signature(signed, locked, {}, BundleError)


def test_no_message_shows_a_private_key(signed, keys):
    secret = keys["ours"][0].read_bytes()
    said = refused(signed, DATA, secret)  # a private key where a public one belongs
    assert not any(line in said for line in secret.decode().split("\n") if line)


def test_without_the_library():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import amips\n"
        "for call in (lambda: amips.load('nowhere', trusted='k'), lambda: amips.signing.new_key('k')):\n"
        "    try: call()\n"
        "    except amips.AmipsError as problem: print(problem)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "checking a signature needs cryptography; pip install 'amips[sign]'",
        "signing needs cryptography; pip install 'amips[sign]'",
    ], done.stderr


def test_importing_amips_does_not_import_the_library():
    code = "import sys, amips; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
