"""Questions in words over HTTP."""

import asyncio
import json

import numpy as np

import amips
from amips.serving import Tokens
from amips.text import asking, attach, embed
from helpers import Words
from serving_helpers import WRITE, application, described, headers, talk


def test_questions(tmp_path, monkeypatch):
    words = [f"word{i}" for i in range(40)]
    rng = np.random.default_rng(0)
    lines = [{"_id": f"doc{i}", "title": "", "text": " ".join(rng.choice(words, 4))} for i in range(300)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "queries.txt").write_text("".join(" ".join(rng.choice(words, 2)) + "\n" for _ in range(300)))
    embedded = embed(
        tmp_path / "corpus.jsonl", tmp_path / "queries.txt", encoder=Words(), out=tmp_path / "vectors"
    )
    task = amips.label(embedded.keys, embedded.queries, cells=4, k=10, val=60, test=40)
    amips.build(task, storage="flat", out=tmp_path / "bundle").close()
    attach(tmp_path / "bundle", embedded)
    batches = []

    class Counted(Words):
        def encode(self, texts):
            batches.append(len(texts))
            return super().encode(texts)

    monkeypatch.setattr(asking, "open_published", lambda name: Counted())
    app = application(tmp_path / "bundle", tokens=Tokens.of(None, WRITE))

    async def conversation(client):
        answer = await client.post("/ask", json={"question": "word3 word5", "k": 3})
        empty = await client.post("/ask", json={"question": " "})
        explanation = await client.post("/explain", json={"question": "word3 word5", "k": 3})
        assert described(explanation) == 200
        explained = explanation.json()
        assert [hit["text"] for hit in explained["results"]] == [hit["text"] for hit in answer.json()["hits"]]
        texts = (await client.get("/info")).json()["texts"]
        several = [" ", *[f"word{i} word{i + 1}" for i in range(7)]]
        alone = [(await client.post("/ask", json={"question": one})).json() for one in several]
        batches.clear()
        calls = [client.post("/ask", json={"question": one}) for one in several]
        assert [one.json() for one in await asyncio.gather(*calls)] == alone
        await client.post("/add", json={"keys": [[1.0] * Words.d]}, headers=headers(WRITE))
        after = await client.post("/ask", json={"question": "word3 word5"})
        return answer, empty, texts, after

    answer, empty, texts, after = talk(app, conversation)
    assert max(batches) >= 6
    assert [described(one) for one in (answer, empty, after)] == [200, 400, 409]
    best = np.argsort(-(np.load(tmp_path / "vectors" / "keys.npy") @ Words().encode(["word3 word5"])[0]))
    rows = (tmp_path / "vectors" / "keys.jsonl").read_text().splitlines()
    assert answer.json()["hits"][0]["id"] == json.loads(rows[best[0]])["id"]
    assert len(answer.json()["hits"]) == 3
    assert texts is True
    assert "without texts" in after.json()["error"]
