"""Whether learning pays, in words."""

import math
from dataclasses import dataclass

from amips.bench.derive import Axis, Bootstrap, Family, Metric, Ratio, baseline, second_baseline
from amips.bench.searchers import where_at
from amips.bench.systems import System

TARGETS: tuple[tuple[Metric, float], ...] = (
    ("recall@1", 0.90),
    ("recall@1", 0.95),
    ("recall@10", 0.90),
    ("recall@10", 0.95),
)
HEADLINES = (0.95, 0.90, 0.80, 0.70, 0.50)  # the first that both sides reach
REGIMES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98)
SMALL = 0.02  # a ratio this near to 1 is no difference worth a word


@dataclass(frozen=True)
class Verdict:
    """The sentences, and the contender that they are about; None when there is none."""

    sentences: list[str]
    contender: str | None


def choose(on_val: list[Family]) -> str | None:
    """The contender that costs the fewest FLOPs on the val queries at the highest recall any reaches.

    Where none reaches any, the one that comes nearest. A model on a backend is no contender of FAISS IVF:
    what it gains, or loses, may be the backend's.
    """
    contenders = [family for family in on_val if family.role == "contender" and family.host is None]
    for target in HEADLINES:
        costs = {f.name: f.cost_at("flops", "recall@10", target) for f in contenders}
        reached = {name: cost for name, cost in costs.items() if not math.isnan(cost)}
        if reached:
            return min(reached, key=lambda name: reached[name])
    best = {f.name: float(f.recalls("recall@10").max()) for f in contenders}
    return max(best, key=lambda name: best[name], default=None)


def best_system(on_val: list[Family]) -> System | None:
    """Which index to build: the cells and router, learned or not, that cost the fewest FLOPs on val.

    At the highest recall that any reaches; None where none reaches any.
    """
    families = [family for family in on_val if family.role != "reference" and family.host is None]
    routed = [run for family in families for run in family.runs]
    for target in HEADLINES:
        best = Family("routed", "contender", routed).nearest("flops", "recall@10", target)
        if best is not None:
            return best.run.system
    return None


def give_verdict(
    tested: list[Family],
    on_val: list[Family],
    bootstrap: Bootstrap,
    queries: int,
    batch: int,
    seconds: dict[str, float],
    more: list[str] | None = None,
) -> Verdict:
    """What a person wants to know: does it pay, how much, where not, what else there is; then `more`."""
    base, second = baseline(tested), second_baseline(tested)
    name = choose(on_val)
    ours = next((family for family in tested if family.name == name), None)
    sentences = []
    if base is not None and ours is not None:
        sentences = _comparison(base, ours, bootstrap, queries, batch)
    if second is not None and ours is not None:
        sentences += gain_sentences([(second, ours)], bootstrap, batch)
    sentences += [*_references(tested, ours or base, seconds, batch), *(more or [])]
    return Verdict(sentences or ["Nothing was compared: there is no baseline, or nothing beside it."], name)


def _comparison(base: Family, ours: Family, bootstrap: Bootstrap, queries: int, batch: int) -> list[str]:
    for target in HEADLINES:
        ratio = bootstrap.ratio(base, ours, "flops", "recall@10", target)
        if ratio is not None:
            break
    else:
        least = HEADLINES[-1]
        if math.isnan(ours.cost_at("flops", "recall@10", least)):
            return [f"{_title(ours.name)} does not reach recall@10 = {least:.2f}: learning does not pay."]
        return [f"Centroid routing does not reach recall@10 = {least:.2f}, which {ours.name} does."]
    ratios = {"FLOPs": ratio}
    parts = [in_words(ratio, "FLOPs", "fewer", "more")]
    axes: list[tuple[Axis, str]] = [("single/1", "batch 1"), ("batch/1", f"batch {batch:,}")]
    for axis, words in axes:
        timed = bootstrap.ratio(base, ours, axis, "recall@10", target)
        if timed is not None:
            ratios[f"time at {words}"] = timed
            parts.append(f"{in_words(timed, 'time', 'less', 'more')} ({words})")
    intervals = "; ".join(f"{what} {ratio}" for what, ratio in ratios.items())
    where = "" if all(ratio.known for ratio in ratios.values()) else " where these are known"
    return [
        _conclusion(ratios),
        f"At recall@10 = {target:.2f} on {queries:,} held-out queries, {ours.name} ({_cells(ours, target)}) "
        f"against the best FAISS IVF ({_cells(base, target)}), one thread: {', '.join(parts)}.",
        f"How many times less, with 95 % intervals{where}: {intervals}.",
        *_regimes(base, ours, bootstrap, {"flops": "FLOPs", **{axis: f"time at {w}" for axis, w in axes}}),
    ]


def _conclusion(ratios: dict[str, Ratio]) -> str:
    """In a few words: what is surely saved, by more than a trifle."""
    saved = [name for name, ratio in ratios.items() if ratio.better and ratio.value > 1 + SMALL]
    unknown = [name for name, ratio in ratios.items() if not (ratio.known or ratio.better or ratio.worse)]
    lost = [name for name in ratios if name not in [*saved, *unknown]]
    if not saved:
        return "On this data, with these models, learning does not pay."
    if not lost and not unknown:
        return "Learning pays on this data."
    but = f", but not {_and(lost)}" if lost else ""
    still = f"; of {_and(unknown)} too little is known" if unknown else ""
    return f"Learning saves {_and(saved)} on this data{but}{still}."


def _regimes(base: Family, ours: Family, bootstrap: Bootstrap, axes: dict[Axis, str]) -> list[str]:
    """Where the contender wins and where it does not, from low recall to high, for every kind of cost."""
    sentences = []
    for axis, what in axes.items():
        places: dict[str, list[float]] = {"less": [], "as much": [], "more": []}
        missed = []
        for target in REGIMES:
            ratio = bootstrap.ratio(base, ours, axis, "recall@10", target)
            if ratio is None:
                there, here = (f.cost_at(axis, "recall@10", target) for f in (base, ours))
                if math.isnan(here) and not math.isnan(there):
                    missed.append(target)
            elif ratio.better and ratio.value > 1 + SMALL:
                places["less"].append(target)
            elif ratio.worse and ratio.value < 1 - SMALL:
                places["more"].append(target)
            elif ratio.known:
                places["as much"].append(target)
        parts = [f"{word} at recall@10 {_listed(at)}" for word, at in places.items() if at]
        if parts:
            sentences.append(f"{_title(what)}, against centroid routing: {'; '.join(parts)}.")
        if missed and axis == "flops":
            sentences.append(
                f"Within a fifth of the keys it does not reach recall@10 {_listed(missed)}, which centroid "
                "routing reaches."
            )
    return sentences


def _references(
    tested: list[Family], ours: Family | None, seconds: dict[str, float], batch: int
) -> list[str]:
    """How far the graph and the exact scan are: lines to know about, whichever side they favour."""
    if ours is None:
        return []
    sentences = []
    modes: list[tuple[Axis, str]] = [("single/1", "batch 1"), ("batch/1", f"batch {batch:,}")]
    for family in tested:
        if family.role != "reference":
            continue
        for target in HEADLINES:
            parts = []
            for axis, words in modes:
                there, here = (f.cost_at(axis, "recall@10", target) for f in (family, ours))
                if not (math.isnan(there) or math.isnan(here)):
                    factor = here / there
                    text = f"{factor:.1f}x faster" if factor >= 1 else f"{1 / factor:.1f}x slower"
                    parts.append(f"{text} at {words} ({there * seconds[axis] * 1e6:,.0f} us a query)")
            if parts:
                sentences.append(
                    f"For reference, at recall@10 = {target:.2f} on one thread, {family.name}: "
                    f"{' and '.join(parts)} than {ours.name}."
                )
                break
    return sentences


def gain_sentences(compared: list[tuple[Family, Family]], bootstrap: Bootstrap, batch: int) -> list[str]:
    """What one costs against another (base, ours), at the highest recall that both reach, one for each."""
    axes: list[tuple[Axis, str]] = [("single/1", "batch 1"), ("batch/1", f"batch {batch:,}")]
    sentences = []
    for base, ours in compared:
        for target in HEADLINES:
            parts = []
            for axis, words in axes:
                ratio = bootstrap.ratio(base, ours, axis, "recall@10", target)
                if ratio is not None:
                    parts.append(f"{in_words(ratio, 'time', 'less', 'more')} ({words})")
            if flops := bootstrap.ratio(base, ours, "flops", "recall@10", target):
                parts.insert(0, in_words(flops, "FLOPs", "fewer", "more"))
            if parts:
                sentences.append(
                    f"{ours.name}, at recall@10 = {target:.2f} against {base.name}{_asked(base, ours)}, "
                    f"one thread: {', '.join(parts)}."
                )
                break
        else:
            least = HEADLINES[-1]
            missed = [f for f in (ours, base) if math.isnan(f.cost_at("single/1", "recall@10", least))]
            why = (
                f"{missed[0].name} does not reach recall@10 = {least:.2f}"
                if missed
                else "too little is known"
            )
            sentences.append(f"{ours.name} against {base.name}: {why}.")
    return sentences


def _asked(base: Family, ours: Family) -> str:
    """How a backend was searched, where the other is the same backend with a model."""
    return " searched with x" if ours.host == base.name else ""


def in_words(ratio: Ratio, what: str, less: str, more: str) -> str:
    """ "1.9x fewer FLOPs", "1.2x more time" or "the same FLOPs"."""
    if not (ratio.known or ratio.better or ratio.worse):
        return f"{what} not known well enough"
    if not (ratio.better or ratio.worse) or abs(ratio.value - 1) <= SMALL:
        return f"about the same {what}"
    return f"{ratio.value:.2f}x {less} {what}" if ratio.value > 1 else f"{1 / ratio.value:.2f}x {more} {what}"


def _cells(family: Family, target: float) -> str:
    nearest = family.nearest("flops", "recall@10", target)
    if nearest is None:
        return "not reached"
    return where_at(nearest.run.system, nearest.run.budget)


def _listed(values: list[float]) -> str:
    return _and([f"{value:.2f}" for value in values])


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]


def _title(text: str) -> str:
    return text[:1].upper() + text[1:]
