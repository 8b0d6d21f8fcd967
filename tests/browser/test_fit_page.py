"""The page "Will it fit?" as a browser opens it from a disk."""

import math
import random
import re
from dataclasses import replace
from datetime import date
from urllib.parse import unquote

import browsing
import fit_page
import pytest
from browsing import NARROW, WIDE, hold_page, shot

from gpumem.estimation.generation import Serving
from gpumem.estimation.paged import Paged
from gpumem.estimation.recipe import Recipe
from gpumem.estimation.recipes_to_try import changes
from gpumem.estimation.script import script
from gpumem.hardware import catalogue
from gpumem.hardware.least_seconds import least_seconds
from gpumem.models.config import find_config
from gpumem.units import GIB, MIB
from labkit.recording import accuracy
from will_it_fit import table as fits
from will_it_fit.build import LENGTHS, point
from will_it_fit.table import (
    MORE_RESERVED,
    MORE_SEEN,
    MORE_UNSURE,
    NEW_TOKENS,
    TOKENS,
    Point,
    Row,
    allocated_of,
    name_of_way,
    paged_servings,
    row_shape,
    techniques,
)

pytestmark = pytest.mark.browser

MODEL = "SmolLM2-135M"  # has published weights, which scripts load
STATE = "#m={}&g={}&n={}&b={}&s={}&may=mixed,adapters,four-bit,bf16,optimizer,backward,cpu,eager"
PUBLISHED = fits.table  # which the page of most tests does not have
#: How long a row may be, in tables that a test makes up.
LONGEST = 4096
NOTHING = Point(*[0] * len(Point._fields))
VERDICTS = ("fits", "near", "tight", "no")
#: So small that not everything fits.
SMALL = replace(
    catalogue.gpu("l4"),
    key="small",
    name="Small",
    usable_bytes=2 * GIB + catalogue.CUDA_CONTEXT_BYTES,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page and its files, of one model, which is all of the table for these tests."""
    folder = tmp_path_factory.mktemp("fit")
    made = replace(PUBLISHED(), models={MODEL: PUBLISHED().models[MODEL]}, outdated={})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(catalogue.GPUS, SMALL.key, SMALL)
        patch.setattr(fit_page, "table", lambda: made)
        fit_page.write_fit_page(folder)
        yield folder


@pytest.fixture
def opened(page, folder):
    """The page, open; a function goes to a state of it."""

    def go(state="", folder=folder):
        page.goto(f"file://{folder}/fit.html{state}")
        page.reload()  # a fragment alone loads nothing
        page.wait_for_selector("#verdict:not(:empty)")
        return page

    return go


# --- between the points ---------------------------------------------------------------------------


def looked_up(page, cases):
    """The page's answers for so many rows of a table, longest sequence, batch size and length."""
    return page.evaluate("cases => cases.map(given => answer(...given))", cases)


def row(peak, seq_len=0, flops=lambda tokens, length: 0):
    """A row of a step whose backward needs ``peak(tokens, length)``."""
    points = []
    for tokens in TOKENS:
        rows, length = row_shape(tokens, seq_len, LONGEST)
        taken = {"backward": peak(tokens, length), "flops": flops(tokens, length)}
        points.append(NOTHING._replace(**taken) if rows else None)
    return Row(seq_len, tuple(points))


def test_allocated_bytes_are_in_the_range_that_is_said(opened):
    """Whatever lives at each moment: fixed bytes, so many per token, so many per pair of tokens."""
    draw, cases, truths = random.Random(3), [], []
    for _ in range(200):
        limits = (10**6, 10**6, 100)
        moments = [[*map(draw.randrange, limits)] for _ in range(draw.randint(1, 4))]

        def peak(tokens, length, moments=moments):
            return max(fixed + tokens * (each + pair * length) for fixed, each, pair in moments)

        batch_size, seq_len = draw.choice([1, 2, 4, draw.randint(1, 64)]), draw.randint(8, LONGEST)
        seq_len = draw.choice([512, 1024, seq_len, seq_len])
        rows = [row(peak, length) for length in LENGTHS]
        cases.append((rows, LONGEST, batch_size, seq_len))
        truths.append(peak(batch_size * seq_len, seq_len))
    pairs = [pair for pair in zip(looked_up(opened(), cases), truths, strict=True) if pair[0]]
    assert {found["exact"] for found, _ in pairs} == {False, True}
    for found, truth in pairs:
        assert found["least"] * (1 - 1e-9) <= truth <= found["most"] * (1 + 1e-9)
        assert found["least"] <= found["allocated"] <= found["most"]
        assert found["allocated"] == truth or not found["exact"]


def test_a_line_is_met_between_points_and_operations_at_every_length(opened):
    def flops(tokens, length):
        return tokens * (6_000 + 5 * length)

    rows = [row(lambda tokens, _: 10**6 + 7 * tokens, flops=flops)]
    sizes = (1, 512), (3, 700), (5, 4096), (31, 1000), (100, 100)
    answers = looked_up(opened(), [(rows, LONGEST, *size) for size in sizes])
    for (batch_size, seq_len), found in zip(sizes, answers, strict=True):
        assert found["allocated"] == pytest.approx(10**6 + 7 * batch_size * seq_len)
        assert found["flops"] == pytest.approx(flops(batch_size * seq_len, seq_len))


def test_where_length_matters_every_length_has_an_answer_and_none_beyond_the_points(opened):
    page = opened()
    rows = [row(lambda tokens, length: tokens * length, each) for each in (512, 1024, 2048)]
    sizes = (1, 700), (1, 1500), (3, 1900), (4, 256), (5, 600)
    answers = looked_up(page, [(rows, LONGEST, *size) for size in sizes])
    for (batch_size, seq_len), found in zip(sizes, answers, strict=True):
        assert found["least"] <= batch_size * seq_len**2 <= found["most"]
        assert not found["known"]
    beyond = [(rows, LONGEST, 1, seq_len) for seq_len in (511, 2049)]
    line = [row(lambda tokens, _: tokens)]
    beyond += [(line, LONGEST, *size) for size in ((1, 511), (17, 4096), (1, 4097))]
    assert not any(looked_up(page, beyond))


def off_the_grid(page, known, count, *, longest, seed):
    """Random models, ways, batches and lengths between the points of a table."""
    draw = random.Random(seed)
    while count:
        name, entry = draw.choice([*known.models.items()])
        index = draw.randrange(len(known.recipes))
        length = draw.randrange(64, min(longest, entry.longest))
        batch_size = draw.randrange(1, 17)
        if not entry.ways[index]:
            continue
        [found] = looked_up(page, [(entry.ways[index], entry.longest, batch_size, length)])
        if found and not found["exact"]:
            count -= 1
            yield name, known.recipes[index].but(batch_size=batch_size, seq_len=length), found


def test_between_points_the_table_is_near_an_estimate(opened):
    for name, recipe, found in off_the_grid(opened(), fit_page.table(), 3, longest=4096, seed=2):
        truth = point(find_config(name)[1], recipe)
        assert found["least"] * 0.99 <= allocated_of(truth) <= found["most"] * 1.01, recipe
        assert found["flops"] == pytest.approx(truth.flops, rel=0.01), recipe


@pytest.mark.nightly
def test_between_its_points_it_is_as_near_as_the_page_says(opened):
    in_range = enough = 0
    days = date.today().toordinal()
    for name, recipe, found in off_the_grid(opened(), PUBLISHED(), 50, longest=16384, seed=days):
        truth = point(find_config(name)[1], recipe)
        allocated, more = allocated_of(truth), truth.reserved / found["reserved"] - 1
        assert found["least"] * 0.95 <= allocated <= found["most"] * 1.05, f"{name}: {recipe}"
        assert -0.2 <= more <= 0.3, f"{name}: {recipe}"
        in_range += found["least"] * 0.99 <= allocated <= found["most"] * 1.01
        enough += more <= MORE_RESERVED
    assert in_range >= 47
    assert enough >= 44


# --- what fits ------------------------------------------------------------------------------------


def judged(page, **changes):
    """What the page finds in its state with these changes, the best first."""
    return page.evaluate("changes => judged({...state, ...changes})", changes)


def fits(found):
    return found["verdict"] in ("fits", "near")


@pytest.mark.parametrize("outdated", [False, True], ids=["new points", "old ones"])
def test_ways_are_judged_by_what_they_take_and_the_best_comes_first(opened, outdated):
    known, seen, draw = fit_page.table(), set(), random.Random(7)
    entry, recipes = known.models[MODEL], {name_of_way(way): way for way in known.recipes}
    page = opened(STATE.format(MODEL, "t4", 1, 1, 512))
    numbers = [*range(len(PUBLISHED().ways))] if outdated else []
    page.evaluate(f"FIT.table.outdated = {{'{MODEL}': {numbers}}}")
    for_training = page.evaluate("FOR_TRAINING")
    for _ in range(60):
        gpu, gpus = draw.choice([SMALL, *fit_page.gpus()]), draw.choice([1, 1, 2])
        gpu, memory_bytes = draw.choice([SMALL, gpu]), draw.choice([5 * MIB, 64 * GIB])
        between = draw.randint(1, 16), draw.randint(32, 1100)
        rows, length = draw.choice([(1, 512), (16, 128), between])
        unwanted = "amp-fp16" if gpu.bf16_native else "bf16"
        ways = {
            name: entry.ways[index]
            for index, (name, recipe) in enumerate(recipes.items())
            if recipe.ranks == gpus and unwanted not in recipe.precision and entry.ways[index]
        }
        cases = [(points, entry.longest, rows, length) for points in ways.values()]
        answers = dict(zip(ways, looked_up(page, cases), strict=True))
        ram = memory_bytes / GIB / for_training
        found = judged(page, g=gpu.key, n=gpus, b=rows, s=length, ram=ram)
        fastest = min((each["perThousand"] for each in found if fits(each)), default=0)
        keys = []
        for each in found:
            name, reserved, limit = each["way"]["label"], each["reserved"], gpu.budget_bytes
            recipe, answer = recipes[name], answers.pop(name)
            for key in ("exact", "known"):
                assert each[key] is (answer[key] and not outdated)
            for key in ("allocated", "reserved", "floor", "least", "most"):
                assert each[key] == answer[key] + fit_page.more_workspace_bytes(gpu)
            if each["allocated"] > limit or gpus * each["host"] > memory_bytes:
                verdict = "no"
            elif reserved > limit:
                verdict = "tight"
            else:
                sure = each["exact"] and not fit_page.more_workspace_bytes(gpu)
                more = 1 + (MORE_SEEN if sure else MORE_UNSURE)
                verdict = "near" if reserved * more > limit else "fits"
            assert each["verdict"] == verdict
            seen.add((verdict, each["known"]))
            work, traffic = {recipe.precision: each["flops"]}, (each["link"], each["sent"])
            seconds = least_seconds(gpu, work, each["moved"], *traffic) / (rows * length * gpus)
            assert each["perThousand"] == pytest.approx(1000 * seconds, rel=1e-6)
            late = each["perThousand"] >= fit_page.SLOW * fastest
            tenth = round(math.log(seconds, 1.1))  # bounds that near are equal
            better = late, len(changes(recipe)), tenth, len(techniques(recipe))
            keys.append((VERDICTS.index(verdict), *(better if fits(each) else ()), reserved))
        assert keys == sorted(keys)
        assert not any(answers.values())  # what is not shown has no answer
    assert {verdict for verdict, _ in seen} == {*VERDICTS}
    assert {known for _, known in seen} == ({False} if outdated else {False, True})
    page.evaluate("update()")
    assert ("earlier version" in page.inner_text("#ways")) is outdated


# --- answering ------------------------------------------------------------------------------------

ANSWER = "#do=answer&m={}&g={}&u={}&p={}&t={}"


def paged_of(way, gpu, serving):
    """What gpumem's own arithmetic says of the table's point."""
    wanted = serving.quantize, fit_page.PAGED_KINDS[fit_page.paged_kind(gpu)][0]
    kinds = [(each.quantize, key) for key, each in paged_servings()]
    point = PUBLISHED().serving[MODEL].paged[kinds.index(wanted)]
    token = point.token // 2 if serving.kv_dtype else point.token
    rest = {"torch": "", "config": find_config(MODEL)[1]}
    return Paged(MODEL, gpu, serving, point.weights, point.activations, token, point.read, **rest)


def test_a_paged_cache_is_gpumems_own_arithmetic(opened):
    page, draw, seen = opened(ANSWER.format(MODEL, "t4", 1, 2048, 128)), random.Random(5), set()
    ways = page.evaluate("FIT.serving.ways.map(({cache, quantize, kv}) => [cache, quantize, kv])")
    for _ in range(300):
        gpu = draw.choice([SMALL, *fit_page.gpus()])
        place = draw.choice([i for i, (cache, *_) in enumerate(ways) if cache == "paged"])
        _, quantize, kv_dtype = ways[place]
        lengths = {"prompt_tokens": draw.randint(1, 9000), "new_tokens": draw.randint(1, 600)}
        users = draw.choice([1, 8, draw.randint(1, 1024)])
        serving = Serving(users=users, quantize=quantize, kv_dtype=kv_dtype, **lengths)
        changed = {"g": gpu.key, "u": users, "p": lengths["prompt_tokens"]}
        found = page.evaluate(
            "([changed, i]) => judgeAnswer({...state, ...changed}, i)",
            [changed | {"t": lengths["new_tokens"]}, place],
        )
        if serving.seq_len > 8192:  # more than the model knows
            assert found is None
            continue
        truth = paged_of(ways[place], gpu, serving)
        assert (found["most"], found["longest"]) == (
            truth.most_users(),
            truth.longest_prompt_tokens(),
        )
        assert found["reserved"] == truth.needed_bytes
        assert found["perSecond"] == pytest.approx(truth.bound_tokens_per_second)
        assert (found["verdict"] in ("fits", "near")) == truth.fits
        seen.add(found["verdict"])
    assert {"fits", "no"} <= seen


def test_transformers_caches_have_the_points_of_the_table_and_nothing_between(opened):
    page = opened(ANSWER.format(MODEL, "t4", 1, 2048, 128))
    points = PUBLISHED().serving[MODEL].points
    assert points
    shapes, ways = page.evaluate("[FIT.serving.shapes, FIT.serving.ways]")
    judge = "([changed, i]) => judgeAnswer({...state, ...changed}, i)"
    kinds = [way for way in ways if way["cache"] != "paged"]
    cases = [(i, *shape) for i, _ in enumerate(kinds) for shape in shapes]
    for (i, users, tokens), stored in zip(cases, points, strict=False):
        state = {"u": users, "p": tokens, "t": NEW_TOKENS, "g": "h100"}
        for change in ({"u": users + 1}, {"p": tokens - 1}, {"t": 127}, {"g": "t4"}):
            assert page.evaluate(judge, [state | change, i]) is None
        gpu = catalogue.gpu("h100")
        found = page.evaluate(judge, [state, i])
        more = fit_page.more_workspace_bytes(gpu) // 2
        assert found["reserved"] == stored.reserved + more
        limits = {
            "fits": found["reserved"] * (1 + MORE_UNSURE) + 1,
            "near": found["reserved"],
            "tight": found["allocated"],
            "no": found["allocated"] - 1,
        }
        for verdict, capacity in limits.items():
            page.evaluate("([key, c]) => { gpuOf({g: key}).capacity = c; }", ["h100", capacity])
            said = page.evaluate(judge, [state, i])["verdict"]
            assert said == verdict or stored.reserved == stored.allocated, (said, verdict)


def test_the_switch_shows_the_other_half_and_is_part_of_the_link(opened):
    page = opened()
    assert page.is_visible("#batch")
    assert page.is_hidden("#users")
    page.check("#do input[value=answer]")
    assert page.is_hidden("#batch")
    assert page.is_hidden("#rules-title")
    page.select_option("#gpu", "l4")
    page.fill("#users", "3")
    page.fill("#prompt", "1000")
    page.uncheck("#allow input[value=nf4]")
    page.locator("#answers input[type=radio]").last.check()
    chosen, verdict = page.locator("#answers tr.chosen").inner_text(), page.inner_text("#verdict")
    command = page.inner_text("#command")
    assert command.startswith(f"labkit estimate {MODEL} --serve --gpu l4 --users 3 --prompt 1000")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#verdict:not(:empty)")
    assert page.locator("#answers tr.chosen").inner_text() == chosen
    assert page.inner_text("#verdict") == verdict
    assert not page.is_checked("#allow input[value=nf4]")
    shot(page, "fit-answer")
    page.check("#do input[value=train]")
    assert page.is_visible("#ways")
    assert page.is_hidden("#answers")
    assert "do=" not in page.url
    page = opened("#do=nothing&u=0&allow=fp4")
    assert "task “nothing”, users “0” (1 to 1,024), change “fp4”" in page.inner_text("#notice")


def test_conversations_that_do_not_fit_lead_to_some_that_do(opened):
    address = ANSWER.format(MODEL, "small", 900, 2048, 128) + "&allow="
    page = opened(address)
    assert page.inner_text("#verdict") == "No answer"
    assert page.locator("#answers tr").count() == 0
    page = opened(address + "vllm")
    assert "does not fit on an Small with what you allow" in page.inner_text("#verdict")
    offers = page.locator("#offers button").all_inner_texts()
    assert any("at a time" in offer for offer in offers)
    for offer in offers:
        page.get_by_role("button", name=offer, exact=True).click()
        assert "✔" in page.inner_text("#verdict") or "≈" in page.inner_text("#verdict")
        opened(address + "vllm")
    page = opened(ANSWER.format(MODEL, "l4", 1, 9000, 128))
    assert "knows 8,192 positions" in page.inner_text("#why")
    page.locator("#offers button").first.click()
    assert "p=8065" in page.url


# --- the page -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("task", ["train", "answer"])
def test_the_page_is_within_reach_of_everybody(browser, folder, size, scheme, task):
    with browsing.watched(browser, size=size) as page:
        page.emulate_media(color_scheme=scheme)
        page.goto(f"file://{folder}/fit.html#do={task}")
        page.wait_for_selector("#verdict:not(:empty)")
        hold_page(page, f"fit-{task}-{scheme}")


def test_every_state_is_a_link_and_comes_back(opened):
    page = opened()
    page.select_option("#gpu", "t4")
    page.fill("#batch", "3")
    page.fill("#length", "700")
    page.uncheck("#may input[value=cpu]")
    page.locator("#ways input[type=radio]").last.check()
    chosen, verdict = page.locator("#ways tr.chosen").inner_text(), page.inner_text("#verdict")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#verdict:not(:empty)")
    assert page.locator("#ways tr.chosen").inner_text() == chosen
    assert page.inner_text("#verdict") == verdict
    assert not page.is_checked("#may input[value=cpu]")
    shot(page, "fit-chosen")
    for broken in ("#m=nothing&g=t5&n=7&b=-1&s=x&w=none", "#%", "#b=1e9"):
        page.goto(address.split("#")[0] + broken)
        page.reload()
        page.wait_for_selector("#verdict:not(:empty)")


def test_the_keyboard_reaches_and_changes_everything(opened):
    page = opened()
    reached = []
    page.focus("#model")
    for _ in range(40):
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.value"))
        page.keyboard.press("Tab")
    assert reached[:5] == ["model", "gpu", "gpus", "batch", "length"]
    assert {"adapters", "eager", "script"} <= {*reached}
    page.focus("#length")
    page.keyboard.press("Control+A")
    page.keyboard.type("700")
    page.focus("#ways :checked")
    before = page.locator("#ways tr.chosen").inner_text()
    page.keyboard.press("ArrowDown")
    assert page.locator("#ways tr.chosen").inner_text() != before
    assert page.evaluate("document.activeElement.checked")  # the table was drawn anew around it
    assert "s=700" in page.url


def test_the_smallest_gpu_is_the_first_that_fits(opened):
    page = opened(STATE.format(MODEL, "t4", 1, 2, 700))
    fact = page.locator("#facts div", has_text="Smallest GPU").inner_text()
    label = page.locator("#ways tr.chosen label").inner_text()
    for gpu in sorted(fit_page.gpus(), key=lambda gpu: gpu.budget_bytes):
        verdicts = {each["way"]["label"]: each["verdict"] for each in judged(page, g=gpu.key)}
        if verdicts.get(label) == "fits":
            assert gpu.name in fact
            return
    assert "none" in fact


def test_the_longest_sequence_is_the_last_that_fits(opened):
    page = opened(STATE.format(MODEL, "small", 1, 4, 512))
    fact = page.locator("#facts div", has_text="Longest sequence").locator("dd").inner_text()
    longest = int(fact.split()[0].replace(",", ""))
    label = page.locator("#ways tr.chosen label").inner_text()

    for length, there in ((longest, True), (longest + page.evaluate("LENGTH_STEP"), False)):
        [found] = [each for each in judged(page, s=length) if each["way"]["label"] == label]
        assert fits(found) is there


def test_what_nothing_can_hold_is_said(opened):
    page = opened(STATE.format(MODEL, "h100", 1, 128, 1024))
    assert page.inner_text("#verdict") == "No answer"
    assert "65,536 tokens" in page.inner_text("#why")
    assert not page.is_visible("#facts")
    page.locator("#offers button").first.click()
    assert "b=64" in page.url
    assert page.is_visible("#facts")
    assert page.is_visible("#command")
    page = opened(STATE.format(MODEL, "h100", 1, 1, 9000))  # the model takes 8,192
    assert "at most 8,192 tokens" in page.inner_text("#why")
    assert page.is_hidden("#command")  # which would be refused


def test_what_may_fit_is_not_said_to_be_impossible(opened):
    page = opened(STATE.format(MODEL, "t4", 1, 1, 512))
    found = page.evaluate("judged(state).find(way => way.reserved > 1.01 * way.allocated)")
    facts = page.locator("#facts div", has_text=re.compile("^(Largest batch|Longest sequence)"))
    limits = {"none is certain": (found["allocated"] + found["reserved"]) / 2}
    limits["none"] = 0.99 * found["allocated"]
    for text, capacity in limits.items():
        page.evaluate(
            """([label, capacity]) => {
                gpuOf(state).capacity = capacity;
                state.w = label;
                update();
            }""",
            [found["way"]["label"], capacity],
        )
        assert facts.locator("dd").evaluate_all("each => each.map(dd => dd.firstChild.data)") == [
            text,
            text,
        ]


def test_what_does_not_fit_leads_to_what_would(opened):
    address = STATE.format(MODEL, "small", 1, 4, 1024).split("&may=")[0] + "&may="
    page = opened(address)
    assert "does not fit on an Small with what you allow" in page.inner_text("#verdict")
    assert "short on the GPU" in page.inner_text("#why")
    assert page.is_visible("#warning")
    offers = page.locator("#offers button").all_inner_texts()
    assert offers
    for offer in offers:
        page.get_by_role("button", name=offer, exact=True).click()
        assert "✔" in page.inner_text("#verdict") or "≈" in page.inner_text("#verdict")
        opened(address)


def test_no_more_ram_is_asked_for_than_helps(opened, monkeypatch, tmp_path):
    """As published: all ways that fit this GPU keep something in RAM, some eight times as much."""
    monkeypatch.setattr(fit_page, "table", PUBLISHED)
    fit_page.write_fit_page(tmp_path)
    page = opened(STATE.format("Mixtral-8x7B", "h100", 1, 1, 2048) + "&ram=64", tmp_path)
    least = min(each["host"] for each in judged(page, ram=10**6) if fits(each))
    needed = math.ceil(least / page.evaluate("FOR_TRAINING") / GIB)
    assert f"Have at least {needed} GiB of RAM" in page.inner_text("#offers")
    assert "GiB short in RAM" in page.inner_text("#why")
    assert "bitsandbytes does not round experts" in page.inner_text("#may")


def test_gradients_that_accumulation_keeps_are_said(opened):
    state = STATE.format(MODEL, "a100-80gb", 1, 1, 1024)

    def facts(way):
        return opened(f"{state}&w={way}").inner_text("#facts")

    parameters = PUBLISHED().models[MODEL].parameters
    assert f"up to {2 * parameters / MIB:.0f} MiB more" in facts("All weights, BF16, AdamW")
    assert f"up to {4 * parameters / MIB:.0f} MiB more" in facts("All weights, FP32, AdamW")
    assert "accumulation" not in facts("LoRA, AMP BF16")


def test_evidence_is_of_the_same_simulation(monkeypatch):
    known, way = PUBLISHED(), Recipe(precision="bf16")
    index = known.recipes.index(way)
    found = known.models[MODEL].ways[index][0].points[known.tokens.index(2048)]
    row = accuracy.AccuracyRow(
        f"{MODEL}, {way.but(batch_size=1, seq_len=2048)}",
        truth_bytes=allocated_of(found),
        tracked_bytes=None,
        simulated_bytes=None,
        reserved_bytes=round(found.reserved * 1.01),
        simulated_reserved_bytes=found.reserved,
    )
    record = next(iter(accuracy.recorded_tables(file=accuracy.FITS_FILE).values()))

    def tried(row):
        only = {"": replace(record, rows=(row,))}
        monkeypatch.setattr(accuracy, "recorded_tables", lambda file: only)
        return fit_page._tried()

    assert "within 1.0 %" in tried(row)[MODEL][index]
    assert tried(replace(row, simulated_reserved_bytes=found.reserved + 1)) == {}  # by older rules


def test_rules_of_thumb_are_held_to_a_plain_run_and_to_the_least(opened):
    page = opened(STATE.format(MODEL, "a100-80gb", 1, 1, 1024))
    rows = [row for row in page.locator("#rules tr").all_inner_texts() if "16 bytes" in row]
    assert ["fused AdamW; gradient checkpointing, chunked loss" in row for row in rows] == [
        False,
        True,
    ]
    page = opened(STATE.format(MODEL, "t4", 1, 1, 1024))
    assert "AMP BF16" not in page.inner_text("#rules")
    assert page.inner_text("#rules").count("AMP FP16") == 4  # mixed precision twice, both adapters


def test_what_was_clicked_can_be_taken_back(opened):
    page = opened(STATE.format(MODEL, "t4", 1, 128, 1024))
    page.locator("#offers button").first.click()
    assert page.inner_text("#verdict") != "No answer"
    page.go_back()
    page.wait_for_function("document.getElementById('verdict').textContent === 'No answer'")


def test_steps_that_help_only_together_are_offered_together(opened):
    page = opened(STATE.format(MODEL, "small", 1, 1, 512).split("&may=")[0] + "&may=")
    page.evaluate("""() => {
        const all = judged({ ...state, may: MAY.map(([key]) => key) }).map(way => way.reserved);
        FIT.gpus = [{ ...gpuOf(state), capacity: 1.04 * Math.min(...all) }];
        state.ram = 0.01; // GiB
        update();
    }""")
    assert "No single change is enough" in page.inner_text("#offers p")
    page.locator("#offers button").first.click()
    assert "✔" in page.inner_text("#verdict")
    assert page.evaluate("state.may") == ["adapters", "cpu"]  # and not more than is needed
    assert page.evaluate("state.ram") == 1
    without_ram = "largestBatch({ ...state, ram: 0.001 }, judged(state)[0].index)"
    assert page.evaluate(without_ram) == "none"


def test_a_link_or_a_number_that_cannot_be_is_said(opened):
    page = opened("#m=nothing&b=3")
    assert "model “nothing”" in page.inner_text("#notice")
    assert "m=nothing" in page.url
    page.fill("#batch", "4")
    assert page.inner_text("#notice") == ""
    page.fill("#batch", "0")
    assert "Batch size per GPU: a whole number from 1 to 128" in page.inner_text("#notice")
    assert "b=4" in page.url
    page = opened("#b=300&may=bf16,nothing")
    assert page.evaluate("[state.b, state.may]") == [128, ["bf16"]]
    assert "change “nothing”" in page.inner_text("#notice")
    page = opened("#g=nvidia-t4&may=nothing")  # what is near, and what was not said
    assert page.evaluate("[state.g, state.may.length]") == ["t4", 7]


def test_a_script_to_take_away_is_the_one_that_advice_writes(opened):
    page = opened(STATE.format(MODEL, "a100-80gb", 1, 3, 700))
    labels = {name_of_way(recipe): recipe for recipe in fit_page.table().recipes}
    for label in page.locator("#ways label").all_inner_texts()[:6]:
        page.get_by_label(label, exact=True).check()
        text = unquote(page.get_attribute("#script", "href").split(",", 1)[1])
        recipe = labels[label].but(batch_size=3, seq_len=700)
        expected = script(recipe, model=MODEL)
        assert re.sub(r"\s+", " ", text) == re.sub(r"\s+", " ", expected)
        compile(text, "train.py", "exec")
    command = page.inner_text("#command")
    assert command.startswith(
        f"labkit estimate {MODEL} --gpu a100-80gb --batch-size 3 --seq-len 700"
    )


def test_without_its_data_the_page_says_so(page, folder, tmp_path):
    for name in ("fit.html", "fit.css", "answer.js", "fit.js", "icon.svg"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for data in ("window.FIT = {table: {schema: 2}};", ""):
        (tmp_path / "fit-data.js").write_text(data)
        page.goto(f"file://{tmp_path}/fit.html")
        assert "missing or damaged" in page.inner_text("#broken")
    assert page.locator("main").is_hidden()
