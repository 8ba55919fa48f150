"""Recipes and networks as text: settings, TOML files, and what is wrong with them in one line."""

import math

import pytest

import amips
from amips.nets import (
    RECIPES,
    KeyNet,
    Linear,
    MaxAffine,
    SupportNet,
    read_recipe,
    read_settings,
    spec_from_json,
    spec_to_json,
)


class TestChanged:
    def test_text_becomes_what_the_field_is(self):
        text = {"rate": "3e-4", "route_top": "1", "decay_warmup": "false", "score": "0", "batch": "64"}
        changed = amips.Recipe().changed(text)
        assert changed == amips.Recipe(rate=3e-4, route_top=1, decay_warmup=False, score=0.0, batch=64)
        assert type(changed.score) is float

    def test_words(self):
        assert amips.Recipe().changed({"reduction": "mean"}).reduction == "mean"

    def test_json_and_back(self):
        """A field that came later is written only where it says something new: old files stay the same."""
        for recipe in (*RECIPES.values(), amips.Recipe(rate=2e-4, reduction="mean")):
            assert amips.Recipe.from_json(recipe.to_json()) == recipe
        assert "reduction" not in amips.Recipe().to_json()
        assert amips.Recipe(reduction="mean").to_json()["reduction"] == "mean"
        assert amips.Recipe().to_json().keys() | {"reduction"} == vars(amips.Recipe()).keys()

    def test_of_another_recipe(self):
        assert RECIPES["paper"].changed({"anchor": 2}).patience == 0

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"rte": "1"}, "a recipe has no field 'rte'; its fields are batch, rate, reference_batch, "),
            ({"rate": "fast"}, "rate=fast: expected a number"),
            ({"rate": "nan"}, "rate=nan: expected a number"),
            ({"batch": "1.5"}, "batch=1.5: expected a whole number"),
            ({"batch": 1.5}, "batch=1.5: expected a whole number"),
            ({"batch": True}, "batch=True: expected a whole number"),
            ({"batch": 64.0}, "batch=64.0: expected a whole number"),
            ({"rate": [1]}, r"rate=\[1\]: expected a number"),
            ({"decay_warmup": "yes"}, "decay_warmup=yes: expected true or false"),
            ({"decay_warmup": 1}, "decay_warmup=1: expected True or False"),
            ({"reduction": "max"}, "reduction='max': expected one of sum, mean"),
            ({"reduction": 1}, "reduction=1: expected one of sum, mean"),
            ({"rate": "0"}, "rate=0.0"),
            ({"patience": "-1"}, "patience=-1: expected a whole number, at least 0"),
            ({"anchor": "-0.5"}, "anchor=-0.5: expected a number, at least 0"),
            ({"listwise": "1.5"}, "listwise=1.5: expected a number from 0 to 1"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, settings, words):
        with pytest.raises(amips.RunError, match=words) as caught:
            amips.Recipe().changed(settings)
        assert "\n" not in str(caught.value)


class TestSettings:
    def test_of_the_recipe_and_of_the_network(self):
        words = ["rate=3e-4", "width=64", "residual=true", "beta=inf", "inject=every 2", "homogeneous=relu"]
        recipe, network = read_settings(words, "support")
        assert recipe == {"rate": "3e-4"}
        spec = spec_from_json({"kind": "support", **network})
        assert spec == SupportNet(
            width=64, residual=True, beta=math.inf, inject="every 2", homogeneous="relu"
        )

    @pytest.mark.parametrize(
        ("word", "kind", "words"),
        [
            ("rate", "linear", "'rate' is not a setting: write NAME=VALUE"),
            ("=3", "linear", "is not a setting"),
            ("rate=", "linear", "is not a setting"),
            ("rte=1", "linear", "there is no setting 'rte'; those of the recipe are batch, rate"),
            ("pieces=3", "linear", "no setting 'pieces'.*of the network bias, rank$"),
        ],
    )
    def test_what_is_wrong(self, word, kind, words):
        with pytest.raises(amips.RunError, match=words) as caught:
            read_settings([word], kind)
        assert "\n" not in str(caught.value)


class TestFile:
    def test_recipe_and_network(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text(
            'rate = 3e-4\nroute_top = 1\n\n[network]\nkind = "max-affine"\npieces = 4\nrank = 0\n'
        )
        recipe, network = read_recipe(path)
        assert recipe == amips.Recipe(rate=3e-4, route_top=1)
        assert spec_from_json(network) == MaxAffine(pieces=4, rank=0)

    def test_the_recipe_alone(self, tmp_path):
        (tmp_path / "mine.toml").write_text("score = 0.1\n")
        assert read_recipe(tmp_path / "mine.toml") == (amips.Recipe(score=0.1), None)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("rate = ", "mine.toml is not TOML"),
            ("rte = 1", "mine.toml: a recipe has no field 'rte'"),
            ('rate = "fast"', "mine.toml: rate=fast: expected a number"),
            ("[network]\nrank = 3", r"mine.toml: \[network\] needs a kind"),
            ("network = 3", r"mine.toml: \[network\] needs a kind"),
            (None, "mine.toml does not exist"),
        ],
    )
    def test_what_is_wrong(self, tmp_path, text, words):
        if text is not None:
            (tmp_path / "mine.toml").write_text(text)
        with pytest.raises(amips.RunError, match=words) as caught:
            read_recipe(tmp_path / "mine.toml")
        assert "\n" not in str(caught.value).replace("\\n", "")


class TestSpecs:
    @pytest.mark.parametrize(
        "spec",
        [
            Linear(),
            Linear(bias=True, rank=0),
            MaxAffine(3, smooth=False),
            SupportNet(size=0.2, beta=math.inf),
            KeyNet(mapper=True, width=9),
        ],
        ids=str,
    )
    def test_json_and_back(self, spec):
        assert spec_from_json(spec_to_json(spec)) == spec

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            (
                {"kind": "linear", "pieces": 2},
                "a linear network has no field 'pieces'; its fields are bias, rank",
            ),
            ({"kind": "tree"}, "kind='tree': expected one of linear, max-affine, support, key"),
            ({"kind": "linear", "bias": "yes"}, "bias='yes': expected True or False"),
            ({"kind": "linear", "rank": True}, "rank=True: expected a whole number"),
            ({"kind": "support", "width": "wide"}, "width='wide': expected a whole number, at least 1"),
            (["linear"], "network=.*: expected a kind and its fields"),
        ],
        ids=str,
    )
    def test_what_is_wrong(self, values, words):
        with pytest.raises(amips.RunError, match=words) as caught:
            spec_from_json(values)
        assert "\n" not in str(caught.value)
