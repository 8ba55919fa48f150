"""sign, verify: who vouches for a bundle."""

from pathlib import Path

import click

import amips
from amips.cli.options import TRUSTED_HELP, cli, echo, output_file, path
from amips.signing import new_key as make_key


@cli.command()
@click.argument("bundle", type=path, required=False)
@click.option("--key", type=path, help="The private key to sign with (Ed25519, PEM).")
@click.option("--new-key", type=output_file, help="Make a key first: FILE, and its public key FILE.pub.")
def sign(bundle: Path | None, key: Path | None, new_key: Path | None) -> None:
    """Sign BUNDLE, after every file of it was verified.

    Whoever has the public key can then tell that BUNDLE is what the owner of the private key signed: verify,
    search, info and ask with --trusted, or amips.load(..., trusted=). Replacing a bundle or its texts undoes
    the signature. With --new-key and without BUNDLE, a key is made and nothing is signed.
    """
    if (key is None) == (new_key is None):
        raise click.UsageError("name the key with --key FILE, or make one with --new-key FILE")
    if key is not None and bundle is None:
        raise click.UsageError("name the bundle to sign")
    if new_key is not None:
        key, public = make_key(new_key)
        echo(f"{key}: a new private key; keep it secret\n{public}: its public key; hand it out")
    if bundle is not None and key is not None:
        echo(f"{bundle}: signed by the key {amips.sign(bundle, key)[:16]}")


@cli.command()
@click.argument("bundle", type=path)
@click.option("--trusted", type=path, multiple=True, help=TRUSTED_HELP)
def verify(bundle: Path, trusted: tuple[Path, ...]) -> None:
    """Check every file of BUNDLE against the manifest.

    With --trusted, the manifest must be signed by that key as well.
    """
    checked = amips.verify(bundle, list(trusted) or None)
    texts = ", texts included" if checked.texts else ""
    echo(f"{bundle}: {checked.files} files have the content that the manifest lists{texts}")
    if checked.changes:
        echo(f"{checked.changes:,} changes since, each of them whole")
    if trusted:
        echo("signed by a trusted key")
    elif checked.signed_by is not None:
        echo(f"the signature names the key {checked.signed_by[:16]}; check it with --trusted FILE")
    else:
        echo("not signed")
