"""Each reward by itself."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from rlhpc.language.rewards import Sample
from rlhpc.language.rewards.math_verifier import _extract_hashed, extract, extract_boxed, extract_tagged, last_number
from rlhpc.language.rewards.text_rewards import ExactReward, FormatReward, HTTPReward, LengthReward
from rlhpc.runtime.errors import ConfigError
from tests.extras import need_extra


def said(response: str, answer: str = "", **more) -> Sample:
    return Sample("question", response, answer, **more)


def test_answers_are_found():
    assert extract_boxed(r"so \boxed{1}, no, \boxed{\frac{1}{2}} it is") == r"\frac{1}{2}"
    assert extract_boxed(r"\boxed{a \} b}") == r"a \} b"
    assert extract_boxed(r"\boxed 5.") == "5" and extract_boxed(r"\fbox{7}") == "7"
    assert extract_boxed("none") is None and extract_boxed(r"\boxed{not closed") is None
    assert _extract_hashed("#### 1\nno:\n#### 1,200 \nend") == "1,200" and _extract_hashed("####") is None
    assert (
        extract_tagged("<answer>1</answer> <answer> 2 </answer>") == "2" and extract_tagged("</answer><answer>") is None
    )
    assert last_number("from 3 to -4.5, or $1,250.") == "$1,250" and last_number("none") is None
    assert last_number("it is 1/2") == "1/2"
    assert extract(r"#### 3 or \boxed{4}", ("boxed", "####")) == "4"
    assert extract(r"#### 3", ("boxed", "####")) == "3" and extract("3", ("boxed", "####")) is None


def test_exact():
    reward = ExactReward()
    assert reward(said(" a  b\n", "a b")) == 1 and reward(said("A b", "a b")) == 0
    assert ExactReward(ignore_case=True)(said("A b", "a B")) == 1
    reward = ExactReward(extract=r"answer: (\w+)")
    assert reward(said("answer: 3. No, answer: 4", "4")) == 1 and reward(said("4", "4")) == 0
    assert ExactReward(extract=r"\d+")(said("3 then 4", "4")) == 1
    assert ExactReward.inline() and not ExactReward.inline(extract=".")
    with pytest.raises(ConfigError, match="no regular expression"):
        ExactReward(extract="(")


def test_format():
    reward = FormatReward(r"<think>.*</think>\s*<answer>.*</answer>")
    assert reward(said("<think>a\nb</think>\n<answer>4</answer>")) == 1
    assert reward(said("so <think>a</think><answer>4</answer>")) == 0
    assert FormatReward("a+", anywhere=True)(said("caat")) == 1
    assert FormatReward(".*", finished=True)(said("x", finished=False)) == 0


def test_length():
    reward = LengthReward(limit=100, start=60)
    assert [reward(said("", tokens=n)) for n in (0, 60, 80, 100, 500)] == [0, 0, -0.5, -1, -1]
    with pytest.raises(ConfigError, match="needed: 0 <= start < limit"):
        LengthReward(limit=10, start=10)


MATH = [
    ("5", "5.0", 1), ("1/2", r"\frac{1}{2}", 1), ("0.5", r"\dfrac12", 1), ("1,000", "1000", 1), ("1000", "1e3", 1),
    ("18", r"\$18", 1), ("18", "18 dollars", 1), ("-3", "- 3", 1), (r"\frac{3}{4}", ".75", 1), ("10^6", "1000000", 1),
    ("x^2+1", "1+x^{2}", 1), (r"\sqrt{8}", r"2\sqrt{2}", 1), ("(1,2)", "(1, 2)", 1), (r"\{1,2\}", r"\{2,1\}", 1),
    (r"\text{Monday}", "Monday", 1), ("x=5", "5", 1), ("[0,1]", "[0,1]", 1), ("12", r"12^\circ", 1),
    ("5", "6", 0), ("12", "1 2", 0), ("-2", "2", 0), ("x", "y", 0), ("[0,1]", "[0,1)", 0), (r"\pi", "3.14159", 0),
    ("3", "3,4", 0), ("5", r"\{1,2,3,4,5\}", 0), ("5", "1,2,3,4,5", 0), ("3", "x>0", 0), ("7", "x=7 or x=8", 0),
    ("1", "1/0", 0), ("2", "2x", 0), ("3", "", 0), ("3", "\\", 0), ("3", "{", 0), ("3", "9" * 2000, 0),
]  # fmt: skip


def test_math():
    """Numbers by value, expressions by algebra, everything else by text; and nothing for hedging."""
    need_extra("llm")
    from rlhpc.language.rewards.math_verifier import MathReward

    reward = MathReward()
    for wanted, given, value in MATH:
        assert reward(said(rf"So it is \boxed{{{given}}}.", wanted)) == value, (wanted, given)
    # GSM8K: the reference is a worked solution
    assert reward(said("She has 3 + 4 = 7.\n#### 7", "3 and 4 is <<3+4=7>>7\n#### 7")) == 1
    # MATH: so it is there, too
    assert reward(said(r"\boxed{7}", r"Adding gives $\boxed{7}$.")) == 1
    assert reward(said(r"first \boxed{7}, then \boxed{8}", "7")) == 0
    assert reward(said("The answer is 7", "7")) == 0
    assert MathReward(last_number=True)(said("The answer is 7.", "7")) == 1
    assert MathReward(extract=["tag"])(said("<answer>7</answer>", "7")) == 1
    with pytest.raises(ConfigError, match=r"extract of 'math' has 'box'; allowed: a list of boxed"):
        MathReward(extract=["box"])
    with pytest.raises(ValueError, match="no answer"):
        reward(said("7", ""))


def test_reasoning_gym():
    """The scorer of the task itself: full marks for the reference, not for another answer; also after JSON."""
    need_extra("llm")
    import reasoning_gym as gym

    from rlhpc.language.rewards.text_rewards import ReasoningGymReward

    reward = ReasoningGymReward()
    for task in ("chain_sum", "leg_counting", "spell_backward", "countdown"):
        entry = gym.create_dataset(task, seed=3, size=1)[0]
        meta = json.loads(json.dumps({"task": task, "task_kwargs": {}, "entry": entry}))
        answer = entry["answer"] or entry["metadata"]["expression"]
        assert reward(said(f"thinking...<answer> {answer} </answer>", meta=meta)) == 1, task
        assert reward(said(str(answer), meta=meta)) == 1, task
        assert reward(said("<answer>123456789123</answer>", meta=meta)) < 0.5, task
    with pytest.raises(ValueError, match="no entry"):
        reward(said("7"))


class Service(http.server.BaseHTTPRequestHandler):
    """Replies what the response asks for."""

    tries = 0
    seen: dict = {}  # noqa: RUF012

    def do_POST(self):
        Service.tries += 1
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Service.seen = {**asked, "authorization": self.headers.get("Authorization")}
        code = 503 if asked["response"] == "flaky" and Service.tries < 3 else 400 if asked["response"] == "bad" else 200
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps({"reward": 0.25, "detail": {"score": "0.5"}, "none": None}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def service():
    Service.tries = 0
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/judge"
    server.shutdown()
    server.server_close()
    thread.join()


def test_http(service, monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "t0ken")
    reward = HTTPReward(service, token_env="JUDGE_TOKEN")
    assert reward(said("good", "a", meta={"k": [1]}, tokens=3)) == 0.25
    assert Service.seen == {
        "prompt": "question", "response": "good", "answer": "a", "meta": {"k": [1]}, "tokens": 3, "finished": True,
        "authorization": "Bearer t0ken",
    }  # fmt: skip
    assert HTTPReward(service, field="detail.score")(said("good")) == 0.5
    with pytest.raises(ValueError, match="replied without 'missing'"):
        HTTPReward(service, field="missing")(said("good"))


def test_http_tries_again_where_that_may_help(service):
    assert HTTPReward(service, retries=2)(said("flaky")) == 0.25 and Service.tries == 3
    Service.tries = 0
    with pytest.raises(ValueError, match="replied 503"):
        HTTPReward(service, retries=1)(said("flaky"))
    assert Service.tries == 2
    Service.tries = 0
    with pytest.raises(ValueError, match="replied 400"):
        HTTPReward(service, retries=5)(said("bad"))
    assert Service.tries == 1
    with pytest.raises(ValueError, match="refused"):
        HTTPReward("http://127.0.0.1:9", retries=1)(said("x"))
    with pytest.raises(ConfigError, match="must begin with http"):
        HTTPReward("localhost:8000")
    with pytest.raises(ConfigError, match="not in the environment"):
        HTTPReward(service, token_env="NO_SUCH_TOKEN")


@pytest.mark.parametrize(
    ("answer", "response", "worth"),
    [
        ('["Paris", "the city of light"]', "The City of Light", 1.0),
        ('["Paris", "the city of light"]', "London", 0.0),
        ('["Paris"', "paris", 0.0),  # no list: a text that begins like one
        ("[1, 2]", "1", 0.0),  # a list of numbers is an answer
        ('["a", 1]', "a", 0.0),
        ('["a", "b"]', '["a", "b"]', 1.0),
    ],
)
def test_any_of_several_references_is_right(answer: str, response: str, worth: float) -> None:
    assert ExactReward(ignore_case=True)(Sample("", response, answer, {})) == worth
