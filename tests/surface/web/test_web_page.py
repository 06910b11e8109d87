"""The page in a headless Chromium: what a person does with it, at the width of a desk and of a phone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from served import serving
from typer.testing import CliRunner

from forerun.question.devices.prices import find_currency
from forerun.surface.cli.main import app

sync_api = pytest.importorskip("playwright.sync_api")
sync_api.expect.set_options(timeout=120_000)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"
)

SMALL = "#model=cnn:depth=2,base_filters=32&device=t4&dataset=cifar10&compare=t4,l4,a100-sxm4-40gb,h100-sxm&epochs=10"
CAPTURE = Path(__file__).parents[2] / "kept_files" / "2026-11" / "capture.forerun"
DESK = {"width": 1360, "height": 1000}
PHONE = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("served") / "log") as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def complaints():
    return []


@pytest.fixture
def opened(browser, address, complaints) -> Iterator:
    """Opens the page at a width; whatever goes wrong in it is a complaint."""
    contexts = []

    def open_page(viewport=DESK, link=SMALL, **options):
        context = browser.new_context(viewport=viewport, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
        page.on("request", lambda request: _note_stranger(request.url, address, complaints))
        page.goto(f"{address}/{link}")
        page.wait_for_selector("body[data-exact]")
        return page

    yield open_page
    for context in contexts:
        context.close()


def _note_stranger(url, address, complaints):
    if urlparse(url).scheme in ("http", "https", "ws") and not url.startswith(f"{address}/"):
        complaints.append(f"left the host: {url}")


def cards(page):
    return dict(
        zip(
            page.locator(".card .name").all_inner_texts(),
            page.locator(".card .value").all_inner_texts(),
            strict=True,
        )
    )


def slide(page, name, value):
    """Moves a slider and waits for the exact answer to it."""
    page.evaluate("delete document.body.dataset.exact")
    page.locator(f"#{name}").evaluate(
        "(e, value) => { e.value = value; e.dispatchEvent(new Event('input', { bubbles: true })); }", value
    )
    page.wait_for_selector("body[data-exact]")


def screenshot(page, name):
    """Written where FORERUN_SCREENSHOTS says, for a person to look at."""
    folder = os.environ.get("FORERUN_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_a_question_that_takes_long_is_said_to_be_asked(browser, address):
    page = browser.new_page()
    page.route("**/predict", lambda route: None)  # never answered
    page.goto(f"{address}/{SMALL}")
    page.wait_for_selector("body.busy")
    assert "Predicting" in page.evaluate(
        "getComputedStyle(document.querySelector('#cards'), '::after').content"
    )
    page.close()


def test_a_busy_server_is_asked_again_and_one_that_is_gone_is_said_to_be(browser, address):
    page = browser.new_page()
    busy = {"status": 429, "headers": {"Retry-After": "1"}, "json": {"error": "wait for one of them"}}
    for path in ("predict", "plan", "models"):
        page.route(f"**/{path}", lambda route: route.fulfill(**busy), times=1)
    page.goto(f"{address}/{SMALL}")
    page.wait_for_selector("body[data-exact][data-models]")
    assert page.locator("#error").is_hidden()
    together = (
        "import('/static/words.js').then((w) => w.range({ low: 1.88e5, high: 4.9e6 }, w.energyLike(3.34e5)))"
    )
    assert page.evaluate(together) == "52.2 to 1,361 Wh"
    page.context.set_offline(True)
    page.locator("#epochs").fill("3")
    page.wait_for_selector("#error:not([hidden])")
    assert "forerun serve" in page.locator("#error").inner_text()
    page.close()


def test_a_new_model_has_its_estimate_before_the_devices_are_compared(browser, address):
    page = browser.new_page()
    page.route("**/plan", lambda route: None)  # never answered
    page.goto(f"{address}/{SMALL}")
    page.wait_for_selector("body:not(.busy) .card .range")
    assert page.locator("#memory-words").inner_text()
    assert page.locator("#table tbody tr").count() == 0
    screenshot(page, "before-the-plan")
    page.close()


def test_while_a_new_model_is_traced_moved_settings_ask_nothing_and_a_late_list_is_searched(browser, address):
    page = browser.new_page()
    asked, lists = [], []
    page.route("**/predict", lambda route: asked.append(route))  # never answered
    page.route("**/models", lambda route: lists.append(route))
    page.goto(f"{address}/#model=cnn:depth=4&device=t4&dataset=cifar10")
    page.wait_for_selector("body.busy")
    for batch in (20, 21, 22, 23):
        page.locator("#batch").evaluate(
            "(e, value) => { e.value = value; e.dispatchEvent(new Event('input', { bubbles: true })); }",
            batch,
        )
    page.locator("#model").fill("wide resnet")
    lists[0].continue_()
    page.wait_for_selector("#found-models li")
    assert page.locator("#model").input_value() == "wide resnet"
    assert len(asked) == 1
    page.close()


def test_sliders_change_the_numbers_and_nothing_complains(opened, complaints):
    page = opened()
    before = cards(page)
    assert set(before) == {
        "step",
        "throughput",
        "model FLOPs utilisation",
        "epoch",
        "job",
        "cost of the job",
        "energy of the job",
    }
    assert all(re.match(r"\$?[\d.,]+", value) for value in before.values())
    assert page.locator(".card .range").first.inner_text().startswith("90 %:")
    slide(page, "batch", 36)
    after = cards(page)
    assert int(page.locator("#batch-out").inner_text()) > 512
    assert after["step"] != before["step"]
    memory = page.locator("#memory-words").inner_text()
    assert re.match(r"[\d.]+ [MG]iB of [\d.]+ GiB: fits; largest batch [\d,]+", memory)
    slide(page, "image", 4)
    assert cards(page)["step"] != after["step"]
    assert page.locator("#memory-words").inner_text() != memory
    screenshot(page, "desk")
    assert complaints == []


def test_every_part_of_the_page_has_an_answer(opened, complaints):
    page = opened()
    assert page.locator("#table tbody tr").count() == 4
    assert "Least time: " in page.locator("#choice").inner_text()
    assert page.locator("#bound").inner_text().startswith("Bound by ")
    for chart in ("#rate-chart canvas", "#compare-chart canvas", "#scale-chart canvas"):
        assert page.locator(chart).bounding_box()["width"] > 200
    for chart, at in (("#rate-chart", "batch 64: "), ("#scale-chart", "devices 1: ")):
        assert page.locator(f"{chart} .uplot").get_attribute("aria-label").startswith(at)
    assert page.locator(".u-legend").count() == 0
    assert len(page.locator("#memory-bar + .legend li").all()) > 3
    assert page.locator("#notes li").count() >= 2
    assert complaints == []


def answered_ms(page) -> int:
    return int(page.evaluate("document.body.dataset.answeredMs"))


def test_the_number_of_devices_changes_every_part(opened, complaints):
    page = opened()
    before = {
        name: page.locator(f"#{name}").inner_text() for name in ("scale-words", "memory-words", "choice")
    }
    alone = cards(page)
    slide(page, "devices", 4)
    print(f"devices 1 -> 4: answered in {answered_ms(page)} ms")
    assert page.locator("#devices-out").inner_text() == "4"
    assert cards(page)["throughput"] != alone["throughput"]
    after = {name: page.locator(f"#{name}").inner_text() for name in before}
    assert after["scale-words"].startswith("4 devices are ")
    assert all(after[name] != before[name] for name in before)
    assert " x4 at batch " in after["choice"]
    assert page.get_by_role("button", name="h100-sxm x4").count() == 1
    assert "gradient buckets" in page.locator("#memory-bar + .legend").inner_text()
    assert page.locator("#scale-chart .uplot").get_attribute("aria-label").startswith("devices 4: ")
    screenshot(page, "four-devices")
    for number in (5, 8, 3):
        slide(page, "devices", number)
        print(f"devices -> {number}: answered in {answered_ms(page)} ms")
    slide(page, "batch", 24)
    print(f"batch of 3 devices: answered in {answered_ms(page)} ms")
    assert complaints == []


def test_a_device_whose_link_is_not_known_has_no_curve_but_an_answer(opened):
    page = opened(link="#model=cnn:depth=2,base_filters=32&device=mi350x&dataset=cifar10&compare=t4")
    assert "link" in page.locator("#scale-words").inner_text()
    assert page.locator("#scale-chart canvas").count() == 0
    assert cards(page)["step"]
    assert page.locator("#error").is_hidden()


def test_a_phone_shows_everything_without_scrolling_sideways(opened, complaints):
    page = opened(PHONE, is_mobile=True, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.locator("#rate-chart canvas").bounding_box()["width"] <= PHONE["width"]
    slide(page, "batch", 20)
    assert page.locator("#batch-out").inner_text() != "64"
    screenshot(page, "phone")
    assert complaints == []


def test_dark_mode_is_dark_and_readable(opened, complaints):
    page = opened(color_scheme="dark")
    paper, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )

    def brightness(colour):
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3]) / 3

    assert brightness(paper) < 40 < 180 < brightness(ink)
    screenshot(page, "dark")
    assert complaints == []


def test_the_keyboard_reaches_and_moves_every_control(opened, complaints):
    page = opened()
    names = []
    page.locator("#advanced summary").click()
    page.locator("#model").focus()
    for _ in range(60):
        names.append(page.evaluate("document.activeElement.id || document.activeElement.name"))
        page.keyboard.press("Tab")
    wanted = {
        "device",
        "devices",
        "batch",
        "image",
        "precision",
        "dataset",
        "epochs",
        "within",
        "kind",
        "minimize",
        "compare",
        "optimizer",
        "layout",
        "compile",
        "accumulation",
        "price",
        "vendor",
        "memory",
        "most",
        "capture",
        "machines",
        "inter",
        "parallel",
    }
    assert wanted | {"copy-command", "copy-link", "save-csv", "save-png", "pin"} <= set(names)
    before = page.locator("#batch-out").inner_text()
    page.get_by_role("slider", name="Batch size of each device").focus()
    page.keyboard.press("ArrowRight")
    after = page.locator("#batch-out").inner_text()
    assert after != before
    assert page.locator("#batch").get_attribute("aria-valuetext") == after
    assert complaints == []


def wait_for_hash(page, word: str) -> None:
    """Until the link holds a word. The page's policy forbids what ``wait_for_function`` polls with."""
    for _ in range(200):
        if word in page.evaluate("location.hash"):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"the link never held '{word}': {page.url}")


def test_a_link_reproduces_the_view(opened, complaints):
    page = opened()
    slide(page, "batch", 30)
    slide(page, "devices", 2)
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#advanced summary").click()
    page.locator("#within").fill("cost<=1")
    page.locator("#within").press("Tab")
    wait_for_hash(page, "within")
    page.wait_for_selector("body[data-exact]")
    again = opened(link=page.evaluate("location.hash"))
    assert cards(again) == cards(page)
    assert again.locator("#within").input_value() == "cost<=1"
    assert again.locator("#devices-out").inner_text() == "2"
    assert again.locator("#scale-words").inner_text() == page.locator("#scale-words").inner_text()
    assert again.locator("#choice").inner_text() == page.locator("#choice").inner_text()
    assert complaints == []


def test_amounts_are_shown_in_the_chosen_currency(opened, complaints):
    page = opened()
    dollars = cards(page)["cost of the job"]
    assert dollars.startswith("$")
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#advanced summary").click()
    page.locator("#currency").select_option("EUR")
    wait_for_hash(page, "currency=EUR")
    page.wait_for_selector("body[data-exact]")
    euros = cards(page)["cost of the job"]
    rate = find_currency("eur").usd
    assert euros.startswith("€")
    assert float(euros[1:]) * rate == pytest.approx(float(dollars[1:]), rel=0.02)
    assert "1 EUR =" in page.locator("#notes").inner_text()
    assert "€" in page.locator("#device").inner_text()
    screenshot(page, "euros")
    assert complaints == []


def test_the_command_that_is_copied_is_the_question(opened, complaints):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    page.locator("#copy-command").click()
    sync_api.expect(page.locator("#said")).not_to_have_text("")
    command = page.evaluate("navigator.clipboard.readText()")
    words = shlex.split(command)
    assert words[:3] == ["forerun", "plan", "cnn:depth=2,base_filters=32"]
    result = CliRunner().invoke(app, [*words[1:], "--json"])
    assert result.exit_code == 0, result.stderr
    points = {point["device"]: point for point in json.loads(result.stdout)["best_by_device"]}
    assert set(points) == {"t4", "l4", "a100-sxm4-40gb", "h100-sxm"}
    assert page.locator("#batch-out").inner_text() == str(points["t4"]["batch_size_per_device"])
    slide(page, "devices", 4)
    page.evaluate("document.getElementById('said').textContent = ''")
    page.locator("#copy-command").click()
    sync_api.expect(page.locator("#said")).not_to_have_text("")
    words = shlex.split(page.evaluate("navigator.clipboard.readText()"))
    assert words[words.index("--on") + 1] == "t4x4,l4x4,a100-sxm4-40gbx4,h100-sxmx4"
    result = CliRunner().invoke(app, [*words[1:], "--json"])
    assert result.exit_code == 0, result.stderr
    own = next(p for p in json.loads(result.stdout)["best_by_device"] if p["device"] == "t4")
    step = page.evaluate(
        "(s) => import('/static/words.js').then((say) => say.duration(s))", own["step_time_s"]["value"]
    )
    assert cards(page)["step"] == step
    assert complaints == []


def test_a_row_of_the_table_chooses_its_device(opened, complaints):
    page = opened()
    page.get_by_role("button", name="h100-sxm").click()
    sync_api.expect(page.locator("#device")).to_have_value("h100-sxm")
    assert "device=h100-sxm" in page.evaluate("location.hash")
    assert complaints == []


def test_a_model_that_does_not_exist_is_said_on_the_page(opened):
    page = opened()
    page.locator("#model").fill("torchvision:resnet5")
    page.locator("#model").press("Tab")
    page.wait_for_selector("#error:not([hidden])")
    assert "resnet50" in page.locator("#error").inner_text()
    assert page.locator("#short").is_hidden()
    assert page.locator("#answer").is_hidden()
    page.locator("#model").fill("cnn:depth=2,base_filters=32")
    page.locator("#model").press("Tab")
    page.wait_for_selector("#error", state="hidden")
    page.wait_for_selector("#rate-chart canvas")
    # A chart that is drawn behind an error would have no width to fill.
    assert page.evaluate("document.querySelector('#rate-chart canvas').clientWidth") > 300
    page.go_back()
    page.wait_for_selector("#error:not([hidden])")
    assert page.locator("#model").input_value() == "torchvision:resnet5"


def test_a_budget_that_nobody_meets_is_said_on_the_page(opened, complaints):
    page = opened(link=f"{SMALL}&within=time<=1ms")
    assert page.locator("#choice").inner_text().startswith("Nothing keeps all limits. Nearest: ")
    page.locator("#epochs").fill("-3")
    assert page.locator("#error").inner_text().startswith("Epochs: ")
    assert complaints == []


def test_a_run_that_does_not_fit_has_no_time_and_no_price_but_ways_to_fit(opened, complaints):
    page = opened(link="#batch=1024&device=t4&precision=fp32&compare=t4,l4")
    assert page.locator("#verdict").inner_text().startswith("Does not fit: it needs ")
    assert page.locator(".card").count() == 0
    assert page.locator("#scale-title").is_hidden()
    assert page.locator("#ways button").count() >= 3
    screenshot(page, "does-not-fit")
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#ways button").first.click()
    page.wait_for_selector("body[data-exact]")
    assert page.locator("#verdict").inner_text().startswith("Fits: ")
    assert page.locator(".card").count() >= 6
    assert complaints == []


def test_a_language_model_that_does_not_fit_is_trained_with_adapters(opened, complaints):
    page = opened(
        link="#model=llama-3.2-1b&device=rtx-3070&batch=1&precision=bf16&optimizer=adamw&compare=rtx-3070"
    )
    assert page.locator("#verdict").inner_text().startswith("Does not fit: it needs ")
    assert page.locator("#rate").is_hidden()
    assert page.locator("#all-devices").is_hidden()
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#ways button", has_text="--lora 16").click()
    page.wait_for_selector("body[data-exact]")
    # Memory of adapters is known to -13 and +50 %.
    assert page.locator("#verdict").inner_text().startswith("Too close to call: about ")
    assert page.locator("#question").inner_text().endswith("batch 1, bf16, LoRA 16, recompute full")
    assert page.locator("#adapters").input_value() == "lora"
    assert "lora=16" in page.evaluate("location.hash")
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#adapters").select_option("nf4")
    page.wait_for_selector("body[data-exact]")
    assert "nf4 LoRA 16" in page.locator("#question").inner_text()
    assert page.locator("#rate-chart canvas").is_visible()
    command = (
        "import('/static/state.js').then((s) => s.toCommand(s.fromLink('#model=llama-3.2-1b&fused=liger')))"
    )
    assert page.evaluate(command).endswith("--fused-kernels liger")
    assert complaints == []


def test_two_runs_stand_side_by_side_and_the_table_can_be_saved(opened, complaints):
    page = opened()
    page.locator("#pin").click()
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#precision").select_option("fp32")
    page.wait_for_selector("body[data-exact]")
    assert re.search(r"step\t.*\t.*\t[\d.]+ x", page.locator("#beside-table").inner_text())
    with page.expect_download() as found:
        page.locator("#save-csv").click()
    lines = Path(found.value.path()).read_text().splitlines()
    assert lines[0] == "device,batch,step,job,cost,energy,memory,price,price of"
    assert len(lines) == 5
    with page.expect_download() as found:
        page.locator("#save-png").click()
    assert Path(found.value.path()).read_bytes().startswith(b"\x89PNG")
    assert complaints == []


def test_models_are_searched_and_a_configuration_can_be_pasted(opened, complaints):
    page = opened()
    page.wait_for_selector("body[data-models]")
    page.locator("#model").fill("wide resnet")
    assert "torchvision:wide_resnet50_2" in page.locator("#found-models li").all_inner_texts()
    page.keyboard.press("Escape")
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 512,
              "architectures": ["GPT2LMHeadModel"]}  # fmt: skip
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#paste summary").click()
    page.locator("#config").fill(json.dumps(config))
    page.locator("#use-config").click()
    page.wait_for_selector("body[data-exact]")
    assert page.locator("#question").inner_text().startswith("gpt2 (pasted) on ")
    assert complaints == []


def test_a_capture_is_chosen_and_then_asked_like_any_model(opened, complaints):
    page = opened()
    page.evaluate("delete document.body.dataset.exact")
    page.locator("#capture").set_input_files(CAPTURE)
    page.wait_for_selector("body[data-exact]")
    assert page.locator("#question").inner_text() == "python train.py on NVIDIA T4, batch 8, amp"
    assert page.locator("#optimizer").is_hidden()
    assert page.locator("#dataset").input_value() == "own"
    assert "keeps it for an hour" in page.locator("#said").inner_text()
    slide(page, "devices", 4)
    assert page.locator("#scale-words").inner_text().startswith("4 devices are ")
    command = "import('/static/state.js').then((s) => s.toCommand(s.fromLink(location.hash)))"
    assert page.evaluate(command).startswith("forerun plan capture:capture.forerun --on t4x4,l4x4,")
    again = opened(link=page.evaluate("location.hash"))
    assert cards(again) == cards(page)
    lost = re.sub(r"capture%3A\w+", f"capture%3A{'0' * 16}", page.evaluate("location.hash"))
    page.evaluate("(hash) => { location.hash = hash; }", lost)
    page.wait_for_selector("#error:not([hidden])")
    assert "send the file once more" in page.locator("#error").inner_text()
    assert all("400" in each for each in complaints)  # the browser's own words on the question that failed


def test_a_file_that_is_dropped_and_no_capture_is_refused_in_words(opened):
    page = opened()
    page.evaluate("""() => {
        const data = new DataTransfer();
        data.items.add(new File(["nothing"], "run.forerun"));
        dispatchEvent(new DragEvent("drop", { dataTransfer: data }));
    }""")
    page.wait_for_selector("#error:not([hidden])")
    assert "no file of forerun capture" in page.locator("#error").inner_text()


def test_a_layout_of_several_machines_is_answered(opened, complaints):
    page = opened(
        link="#model=llama-3.2-1b&device=h100-sxm&devices=8&machines=2&parallel=tp=2&strategy=zero1&batch=1"
        "&precision=bf16&optimizer=adamw&compare=h100-sxm"
    )
    assert "on 2 x 8 x NVIDIA H100" in page.locator("#question").inner_text()
    assert page.locator("#verdict").inner_text().startswith("Fits: ")
    assert page.locator("#scale-words").inner_text().startswith("16 devices are ")
    assert "between machines" in page.locator("#scale-words").inner_text()
    assert complaints == []


def test_marks_of_small_amounts_stay_clear_of_the_title_of_their_axis(opened):
    page = opened(
        link="#model=cnn:depth=2,base_filters=32&device=t4&dataset=mnist&currency=EUR&compare=t4,l4,h100-sxm"
    )
    room = page.locator("#compare-chart .u-axis").nth(1).bounding_box()["width"]
    widest = page.evaluate("""() => {
        const context = document.createElement("canvas").getContext("2d");
        context.font = "12px system-ui";
        return context.measureText("€0.0003").width;
    }""")
    assert room >= widest + 10


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_has_no_findings(opened, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(color_scheme=scheme)
    found = axe.run(page).response["violations"]
    assert [(each["id"], [node["html"][:80] for node in each["nodes"]][:3]) for each in found] == []
