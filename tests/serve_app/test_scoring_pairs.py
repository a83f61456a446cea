"""``/v1/score`` and ``/v1/rerank``: scores of pairs by the operator's labels and template."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from lexshard.actors.messages import Request, TokenLogprobs
from lexshard.cluster.config import ServeConfig
from lexshard.serve_app.scoring.pairs import RERANK_PATHS, SCORE_PATHS
from lexshard.serve_app.scoring.template import PairScoring, ScoreTemplate
from lexshard.serve_app.start.preflight import check_files, check_scoring
from lexshard.serve_app.start.readiness import StartupError
from tests.support import mock_engine
from tests.support.mock_engine import MockEngine, Script
from tests.support.mock_server import TOKENIZER, Client, model_folder, post, serve
from tests.support.scored_pairs import LABELS, PAIRS, TEMPLATE, asked, labels_only

SCORE, RERANK = "/v1/score", "/v1/rerank"
# So likely is the first label after a document of so many letters.
LIKELY = {1: 0.25, 2: 0.75, 3: 0.5}


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> MockEngine:
    """One whose scores are those of ``LIKELY``."""
    likely: list[float] = []

    def say(request: Request) -> Script:
        allowed = request.parameters.allowed_ids
        assert allowed == tuple(map(ord, LABELS))
        prompt = bytes(request.prompt_ids).decode()
        likely.append(LIKELY[len(prompt.partition("?")[2]) - 1])
        return Script([allowed[1:]], "length")

    def entry(labels: tuple[int, ...], token_id: int) -> TokenLogprobs:
        share = likely.pop(0)
        told = zip(labels, (share, 1 - share), strict=True)
        top = tuple((label, math.log(each)) for label, each in told)
        return TokenLogprobs(token_id, dict(top)[token_id], 1, top)

    monkeypatch.setattr(mock_engine, "label_entry", entry)
    return MockEngine(script=say)


def scored(body: dict[str, Any], engine: MockEngine, path: str = SCORE) -> dict[str, Any]:
    reply = post(path, body, engine, **PAIRS)
    assert reply.status_code == 200, reply.text
    told: dict[str, Any] = reply.json()
    return told


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
def test_one_query_or_one_for_each_document(names: tuple[str, str], engine: MockEngine) -> None:
    for queries, documents in (("q", ["a", "bc"]), (["q", "q"], ["a", "bc"]), (["q"], "bc")):
        engine.requests.clear()
        told = scored(dict(zip(names, (queries, documents), strict=True)), engine)
        texts = [documents] if isinstance(documents, str) else documents
        assert [each.prompt_ids for each in engine.requests] == [asked("q", text) for text in texts]
        scores = [each["score"] for each in told["data"]]
        assert scores == pytest.approx([LIKELY[len(text)] for text in texts])


def test_scores_are_computed_and_told_as_those_of_labels_are(engine: MockEngine) -> None:
    told = scored({"text_1": "q", "text_2": "a", "request_id": "mine", "priority": 3}, engine)
    assert (told["id"], told["object"], told["model"]) == ("score-mine", "list", "mock")
    assert [(each["index"], each["object"]) for each in told["data"]] == [(0, "score")]
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == 4
    assert told["usage"]["completion_tokens"] == 0
    [request] = engine.requests
    parameters = request.parameters
    assert (parameters.labels, parameters.logprobs, parameters.max_tokens) == (True, 2, 1)
    assert request.priority == 3


def test_documents_are_ranked_the_best_first(engine: MockEngine) -> None:
    body: dict[str, Any] = {"query": "q", "documents": ["a", {"text": "bc"}, "def"]}
    told = scored({**body, "request_id": "mine"}, engine, RERANK)
    assert (told["id"], told["model"]) == ("rerank-mine", "mock")
    assert told["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    assert [(each["index"], each["document"]) for each in told["results"]] == [
        (1, {"text": "bc"}),
        (2, {"text": "def"}),
        (0, {"text": "a"}),
    ]
    assert told["results"][0]["relevance_score"] == pytest.approx(0.75)
    for top_n, count in ((2, 2), (0, 3), (9, 3), (None, 3)):
        results = scored({**body, "top_n": top_n}, engine, RERANK)["results"]
        assert [each["index"] for each in results] == [1, 2, 0][:count]
    bare = scored({**body, "return_documents": False}, engine, RERANK)["results"]
    assert {tuple(each) for each in bare} == {("index", "relevance_score")}


@pytest.mark.parametrize(
    ("path", "fields", "parameter"),
    [
        (SCORE, {"text_1": None}, "text_1"),
        (SCORE, {"text_2": []}, "text_2"),
        (SCORE, {"text_2": ["a", 3]}, "text_2"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (SCORE, {"text_2": "a" * 5000}, "text_2"),
        (SCORE, {"text_2": "a" * 600_000}, "text_2"),
        (SCORE, {"text_2": "refused"}, "text_2"),
        (SCORE, {"queries": "q"}, "text_1"),
        (SCORE, {"priority": -1}, "priority"),
        (SCORE, {"use_activation": False}, "use_activation"),
        (SCORE, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        (SCORE, {"model": "other"}, "model"),
        (RERANK, {"query": None}, "query"),
        (RERANK, {"query": ["q"]}, "query"),
        (RERANK, {"documents": "a"}, "documents"),
        (RERANK, {"documents": []}, "documents"),
        (RERANK, {"documents": ["a", 3]}, "documents"),
        (RERANK, {"documents": [{"text": 3}]}, "documents"),
        (RERANK, {"documents": [{"text": "a", "title": "b"}]}, "documents.0.title"),
        (RERANK, {"documents": ["a"] * 1025}, "documents"),
        (RERANK, {"documents": ["refused"]}, "documents"),
        (RERANK, {"top_n": -1}, "top_n"),
        (RERANK, {"top_m": 1}, "top_m"),
    ],
)
def test_what_is_wrong_is_named(path: str, fields: dict[str, Any], parameter: str) -> None:
    engine = labels_only()
    right: dict[str, Any] = {"text_1": "q", "text_2": "a"}
    right = right if path == SCORE else {"query": "q", "documents": ["a"]}
    reply = post(path, {**right, **fields}, engine, **PAIRS)
    assert reply.status_code == (404 if parameter == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == parameter
    assert engine.requests == []


def test_more_pairs_than_the_server_runs_are_refused() -> None:
    body = {"query": "q", "documents": ["a", "b"]}
    reply = post(RERANK, body, labels_only(), **PAIRS, max_running_requests=1)
    assert reply.status_code == 400


def test_the_routes_are_there_where_the_operator_says_how_to_score() -> None:
    async def check(client: Client, status: int) -> None:
        for path in SCORE_PATHS:
            reply = await client.post(path, json={"text_1": "q", "text_2": "a"})
            assert reply.status_code == status
        for path in RERANK_PATHS:
            reply = await client.post(path, json={"query": "q", "documents": ["a"]})
            assert reply.status_code == status
            if status == 404:
                assert "--score-template" in reply.json()["error"]["message"]
        described = (await client.get("/openapi.json")).json()["paths"]
        assert (set(described) >= {*SCORE_PATHS, *RERANK_PATHS}) == (status == 200)

    serve(lambda client: check(client, 404))
    serve(lambda client: check(client, 200), labels_only(), **PAIRS)


# -- what is checked before a start ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"score_template": None}, "--score-label needs a template"),
        ({"score_labels": []}, "2 to 64 labels, not 0"),
        ({"score_labels": ["Y"]}, "2 to 64 labels, not 1"),
        ({"score_template": "absent"}, "cannot read the score template absent: No such file"),
    ],
)
def test_labels_and_template_go_together(options: dict[str, Any], told: str) -> None:
    with pytest.raises(StartupError, match=told):
        check_scoring(ServeConfig(model="mock", **PAIRS | options))


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (["yes", "N"], "'yes' is 3 tokens of the model \\('y' 'e' 's'\\): give a text"),
        (["N", "Y", "N"], "'N' and 'N' are the same token"),
    ],
)
def test_a_label_is_one_token(labels: list[str], told: str, tmp_path: Path) -> None:
    folder = str(model_folder(tmp_path))
    check_files(ServeConfig(model=folder, **PAIRS))
    with pytest.raises(StartupError, match=told):
        check_files(ServeConfig(model=folder, **PAIRS | {"score_labels": labels}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{ query }", "line 1: "),
        ("{{ query }}\n{% if %}", "line 2: "),
        ("{{ query }}", "does not read 'document'"),
        ("{{ query }}{{ document }}{{ documents }}", "reads 'documents'.*did you mean document"),
        ("{{ query }}{{ document }}{{ bos_token }}", "reads 'bos_token'.*told 'query' and 'doc"),
        ("{{ query }}{{ document | nothing }}", "nothing"),
    ],
)
def test_a_template_reads_query_and_document_alone(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "score.jinja"
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        ScoreTemplate(path)


def test_a_template_writes_as_chat_templates_do_and_reaches_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "score.jinja"
    path.write_text("{% for i in range(2) %}\n{{ query }}\n{% endfor %}\n{{ document | tojson }}\n")
    assert ScoreTemplate(path).render("q", "<é>") == 'q\nq\n"<é>"'
    path.write_text("{{ query }}{{ document.__class__.__mro__ }}")
    with pytest.raises(Exception, match="unsafe"):
        ScoreTemplate(path).render("q", "d")


def test_other_processes_find_the_template() -> None:
    config = ServeConfig(model="mock", score_labels=LABELS, score_template="score.jinja")
    absolute = config.with_absolute_paths().score_template
    assert absolute == str(Path("score.jinja").absolute())
    found = PairScoring.of(ServeConfig(model="mock", **PAIRS), TOKENIZER)
    assert found is not None
    assert found.labels == tuple(map(ord, LABELS))
    assert found.template.size == len(TEMPLATE.read_bytes())
