"""The files of deploy/: what they promise, and their commands, run outside of a container."""

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from helpers import ROOT
from serving_helpers import READ, served

DEPLOY = ROOT / "deploy"


def instructions():
    """(instruction, rest) of the Dockerfile, lines that go on joined."""
    text = re.sub(r"^ *#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip()]
    return [tuple(line.split(None, 1)) for line in lines]


def last(name):
    return [rest for instruction, rest in instructions() if instruction == name][-1]


def command(words):
    """The JSON list in a CMD."""
    return json.loads(words[words.index("[") :])


@pytest.mark.parametrize(
    "words",
    [
        ["hadolint", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
    ],
    ids=["Dockerfile", "compose.yaml"],
)
def test_linters_have_nothing_to_say(words):
    tool = Path(sys.executable).with_name(words[0])
    done = subprocess.run([tool, *words[1:]], cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_image_copies_is_let_through_and_the_rest_is_not():
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in ("", "#")]
    copied = {
        name
        for rest in (rest for instruction, rest in instructions() if instruction == "COPY")
        if "--from" not in rest
        for name in rest.split()[:-1]
    }
    assert lines[0] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied


def test_an_image_without_the_compiled_part_is_not_built():
    installed = next(rest for instruction, rest in instructions() if "pip install" in rest)
    check = re.search(r'&& /opt/amips/bin/(python -c "(import [\w.]+)")$', installed)
    assert subprocess.run([sys.executable, "-c", check[2]], check=False).returncode == 0
    assert check[2] == "import amips._native"


def test_the_image_is_pinned_small_and_not_root():
    bases = [rest.split()[0] for instruction, rest in instructions() if instruction == "FROM"]
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", base) for base in bases)
    final = (DEPLOY / "Dockerfile").read_text().rpartition("FROM")[2]
    assert int(last("USER")) > 0
    assert final.index("USER") < final.index("HEALTHCHECK") < final.rindex("CMD [")
    installed = " ".join(rest for instruction, rest in instructions() if instruction == "RUN")
    assert re.findall(r"\.\[(.*?)\]", installed) == ["serve"]
    assert "torch" not in installed
    for name in ("apt-get install", "pip install"):
        assert installed.count(name) == 1
    for source in [rest for instruction, rest in instructions() if instruction == "COPY"]:
        if "--from" not in source:
            assert all((ROOT / name).exists() for name in source.split()[:-1])


def test_the_commands_of_the_image_serve_a_bundle(bundle):
    words = command(last("CMD"))
    assert words[:3] == ["amips", "serve", "/bundle"]
    assert words[3:] == ["--host", "0.0.0.0", "--port", "8000"]
    with served(bundle, "--host", "127.0.0.1", AMIPS_TOKEN=READ) as server:  # tests stay on this machine
        check = command(last("HEALTHCHECK"))
        assert check[0] == "python"
        code = check[2].replace(":8000/", f":{server.port}/")
        assert code != check[2]
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
        address = f"http://127.0.0.1:{server.port}"
        assert httpx.get(f"{address}/metrics").status_code == 401
        assert server.end() == 0
        assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode != 0


def test_compose_and_prometheus_ask_with_the_token(bundle, tmp_path):
    yaml = pytest.importorskip("yaml")
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    amips, prometheus = compose["services"]["amips"], compose["services"]["prometheus"]
    assert (DEPLOY / amips["build"]["context"] / amips["build"]["dockerfile"]).resolve().exists()
    assert all(port.startswith("127.0.0.1:") for one in (amips, prometheus) for port in one["ports"])
    assert re.fullmatch(r"[\w/]+:v\d+\.\d+\.\d+", prometheus["image"])
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    secret = job["authorization"]["credentials_file"]
    assert secret == amips["command"][-1] == "/run/secrets/" + amips["secrets"][0]
    assert prometheus["secrets"] == amips["secrets"] == list(compose["secrets"])
    assert job["static_configs"][0]["targets"] == ["amips:8000"]
    (tmp_path / "token").write_text(READ)
    assert amips["command"][-2] == "--token-file"
    with served(bundle, "--host", "127.0.0.1", "--token-file", tmp_path / "token") as server:
        answer = httpx.get(
            f"http://127.0.0.1:{server.port}/metrics", headers={"authorization": f"Bearer {READ}"}
        )
        assert answer.status_code == 200
        assert "amips_keys 600.0" in answer.text
