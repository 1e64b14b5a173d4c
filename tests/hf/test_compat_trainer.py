"""Trainer, its callback, and TRL: switched on in one line, the same losses as stock."""

import functools
import itertools
import logging
import multiprocessing
import pickle
import warnings

import pytest
import torch
from tiny import VOCABULARY, adapted, batch, close, make, report_of, trainer_options, word_tokenizer

import tigon

pytest.importorskip("accelerate")
from transformers import LlamaForCausalLM, Trainer, TrainingArguments


def rows(count=24, tokens=11):
    inputs = batch(rows=count, tokens=tokens, seed=3)
    return [{name: tensor[i] for name, tensor in inputs.items()} for i in range(count)]


def arguments(folder, **changes):
    options = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    return TrainingArguments(**trainer_options(folder, **options | changes))


def logged(trainer):
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [entry[n] for entry in trainer.state.log_history for n in names if n in entry]


def run(folder, *, model=None, callbacks=None, trainer_options=None, **changes):
    options = {"train_dataset": rows(), "eval_dataset": rows()[:4], **(trainer_options or {})}
    model = make() if model is None else model
    trainer = Trainer(
        model=None if "model_init" in options else model,
        args=arguments(folder, **changes),
        callbacks=callbacks,
        **options,
    )
    return trainer, logged(trainer)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    return run(tmp_path_factory.mktemp("stock"))[1]


def test_use_liger_kernel(facade, tmp_path, stock):
    """TrainingArguments as they are; evaluation with skip_logits as Trainer asks for it."""
    trainer, got = run(
        tmp_path, use_liger_kernel=True, liger_kernel_config={"rope": True, "swiglu": False, "what": 1}
    )
    assert got == pytest.approx(stock, rel=1e-4) and len(got) == 7
    report = report_of(trainer.model)
    assert report.count("loss") == 1 and report.count("mlp") == 0 and report.head_calls.fused == 7
    report.check()


def test_use_liger_kernel_without_the_interface_is_refused(tmp_path):
    from transformers.utils import is_liger_kernel_available

    if is_liger_kernel_available():
        pytest.skip("a real Liger is installed")
    with pytest.raises(ImportError, match="liger-kernel"):
        run(tmp_path, use_liger_kernel=True)


def test_callback(tmp_path, stock):
    callback = tigon.TigonTrainerCallback(mlp=False)
    trainer, got = run(tmp_path, callbacks=[callback])
    assert got == pytest.approx(stock, rel=1e-4)
    assert callback.report is report_of(trainer.model)
    assert callback.report.head_calls.fused == 6 and callback.report.count("mlp") == 0
    with pytest.raises(tigon.Error, match="norms"):
        tigon.TigonTrainerCallback(norms=False)


def test_a_model_that_was_patched_before(tmp_path, stock):
    model = make()
    tigon.apply(model)
    assert run(tmp_path, model=model)[1] == pytest.approx(stock, rel=1e-4)


def test_callback_with_model_init(tmp_path):
    """Every model that is made gets it, and each only once."""
    options = {"trainer_options": {"model_init": lambda: make()}}
    _, wanted = run(tmp_path, **options)
    callback = tigon.TigonTrainerCallback()
    trainer, got = run(tmp_path, callbacks=[callback], **options)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert callback.report.head_calls.fused == 6
    assert callback.report is report_of(trainer.model)


def test_callback_under_compile_and_peft(tmp_path):
    """Before accelerate compiles; on the model inside PEFT's wrapper."""
    torch._dynamo.reset()

    def lora():
        return adapted(make(num_hidden_layers=1), target_modules=["q_proj", "up_proj"])

    _, wanted = run(tmp_path, model=lora())
    callback = tigon.TigonTrainerCallback()
    _, got = run(
        tmp_path, model=lora(), callbacks=[callback], torch_compile=True, torch_compile_backend="aot_eager"
    )
    assert got == pytest.approx(wanted, rel=1e-3)
    assert callback.report.head_calls.traced


def test_callback_warns_when_the_head_was_not_used(tmp_path, caplog):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            labels = inputs.pop("labels")
            logits = model(**inputs).logits + 0.0  # takes them apart
            loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
            return (loss, {"logits": logits}) if return_outputs else loss

    callback = tigon.TigonTrainerCallback()
    with caplog.at_level(logging.WARNING, "tigon"):
        options = {"model": make(), "args": arguments(tmp_path, eval_strategy="no"), "train_dataset": rows()}
        options |= {"callbacks": [callback]}
        trainer = OwnLoss(**options)
        trainer.train()
    (said,) = [r.getMessage() for r in caplog.records if r.name == "tigon" and r.levelno >= logging.WARNING]
    assert "computes all logits in training" in said and "label" in said


def test_losses_without_labels_in_the_model(tmp_path, caplog):
    """Label smoothing: the warning says why the head was not used."""
    options = {"label_smoothing_factor": 0.1, "eval_strategy": "no"}
    _, wanted = run(tmp_path, **options)
    callback = tigon.TigonTrainerCallback()
    with caplog.at_level(logging.WARNING, "tigon"):
        _, got = run(tmp_path, callbacks=[callback], **options)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert "label_smoothing_factor" in caplog.text and callback.report.head_calls.lazy == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_compute_loss_func_with_lazy_logits(smoothing, tmp_path, caplog):
    """Also in the place of label_smoothing_factor, as the warning above advises: the same losses, fused."""

    def loss(output, labels, num_items_in_batch=None):
        rows = output["logits"][:, :-1].float().reshape(-1, VOCABULARY)
        options = {"label_smoothing": smoothing, "reduction": "sum"}
        loss = torch.nn.functional.cross_entropy(rows, labels[:, 1:].reshape(-1), **options)
        return loss / num_items_in_batch

    options = {"trainer_options": {"compute_loss_func": loss}}
    _, wanted = run(
        tmp_path, eval_strategy="no", **({"label_smoothing_factor": smoothing} if smoothing else options)
    )
    callback = tigon.TigonTrainerCallback(lazy_logits=True)
    with caplog.at_level(logging.WARNING, "tigon"):
        _, got = run(tmp_path, callbacks=[callback], eval_strategy="no", **options)
    assert got == pytest.approx(wanted, rel=1e-4)
    assert callback.report.head_calls.fused == 6 and not caplog.text


def test_compute_metrics(tmp_path):
    """Evaluation sees real logits, preprocessed and whole."""
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"right": float((prediction.predictions == prediction.label_ids).mean())}

    run(
        tmp_path,
        callbacks=[tigon.TigonTrainerCallback()],
        trainer_options={
            "compute_metrics": metrics,
            "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        },
    )
    assert seen == [(4, 11)]


def test_workers_and_checkpoints(tmp_path, stock):
    """Dataloader workers are forked after the patch; a checkpoint loads into a stock model."""
    folder = tmp_path / "out"
    options = {"callbacks": [tigon.TigonTrainerCallback()], "dataloader_num_workers": 2}
    options |= {"save_strategy": "steps", "save_steps": 3}
    trainer, got = run(folder, **options)
    assert got == pytest.approx(stock, rel=1e-4)
    loaded = LlamaForCausalLM.from_pretrained(folder / "checkpoint-3", attn_implementation="eager")
    assert not hasattr(loaded, "_tigon_state")
    inputs = batch()
    close(loaded.eval()(**inputs).loss, trainer.model.eval()(**inputs).loss)


# --- bad days --------------------------------------------------------------------------------


def _loss_in_child(folder):
    torch.set_num_threads(1)
    loss = torch.load(folder / "model.pt", weights_only=False)(**batch()).loss
    (folder / "loss.txt").write_text(repr(loss.item()))


def picklable():
    """A model that pickle takes as it is; with the package `kernels` transformers' own are none."""
    model = make()
    try:
        pickle.dumps(model)
    except AttributeError as error:
        pytest.skip(f"a stock model cannot be pickled here: {error}")
    return model


def test_a_spawned_process(tmp_path):
    """It unpickles a patched model and computes; forked ones: the workers of the data loader above."""
    model = picklable()
    tigon.apply(model)
    wanted = model(**batch()).loss.item()
    torch.save(model, tmp_path / "model.pt")
    child = multiprocessing.get_context("spawn").Process(target=_loss_in_child, args=(tmp_path,))
    child.start()
    child.join(300)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert float((tmp_path / "loss.txt").read_text()) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "version, told",
    [("4.57.1", True), ("5.16.4", True), ("5.17.0", False), ("5.24.0", False), ("5.25.0.dev0", True)],
)
def test_transformers_outside_the_tested_range(version, told, monkeypatch):
    monkeypatch.setattr("transformers.__version__", version)
    tigon._look_at_transformers.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _ = tigon.apply, tigon.apply
    texts = [str(entry.message) for entry in caught if "tested range" in str(entry.message)]
    assert len(texts) == (1 if told else 0)
    assert not told or f"transformers {version} is outside" in texts[0]
    tigon._look_at_transformers.cache_clear()


# --- TRL -------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    pytest.importorskip("tokenizers")
    return word_tokenizer()


def words(seed, count):
    generator = torch.Generator().manual_seed(seed)
    return " ".join(f"w{i}" for i in torch.randint(3, VOCABULARY, (count,), generator=generator))


def trl_losses(kind, folder, tokenizer, callbacks=None, **changes):
    """Losses of a few steps of one of TRL's trainers."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    prompts = [words(i, 4) for i in range(8)]
    answers = [words(100 + i, 5) for i in range(8)]
    others = [words(200 + i, 5) for i in range(8)]
    options = {"max_steps": 2, "learning_rate": 1e-3, "bf16": False, "gradient_checkpointing": False}
    options = trainer_options(folder, **options | changes)
    columns = {
        "SFT": {"prompt": prompts, "completion": answers},
        "DPO": {"prompt": prompts, "chosen": answers, "rejected": others},
        "KTO": {"prompt": prompts, "completion": answers, "label": [True, False] * 4},
        "GRPO": {"prompt": prompts},
    }[kind]
    make().save_pretrained(folder / "model")
    extra = {}
    if kind == "GRPO":
        options |= {"num_generations": 2, "max_completion_length": 6}
        extra = {"reward_funcs": lambda completions, **_: [float(len(set(c.split()))) for c in completions]}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=str(folder / "model"),
        args=getattr(trl, f"{kind}Config")(**options),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer,
        callbacks=callbacks,
        **extra,
    )
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture
def trl():
    """Tigon's integration, uninstalled after the test."""
    pytest.importorskip("trl")
    from tigon.integrations import trl

    yield trl
    trl.uninstall()


@pytest.mark.parametrize(
    "kind, switch",
    [*itertools.product(("SFT", "DPO", "KTO", "GRPO"), ["use_liger_kernel"]), ("SFT", "use_kernels")],
)
def test_trl(kind, switch, tmp_path, tokenizer, trl):
    """One line before the trainer: TRL's old switch and the one that it recommends both end at Tigon."""
    from transformers.utils import is_kernels_available

    from tigon.integrations import liger

    if switch == "use_kernels" and not is_kernels_available():
        pytest.skip("needs the package kernels in the version that this transformers takes")
    wanted = trl_losses(kind, tmp_path, tokenizer)[1]
    asked = {"use_liger_kernel": True}
    if switch == "use_kernels":
        asked = {"model_init_kwargs": {"use_kernels": True}}
    tigon.compat.trl.install()
    (place,) = (r for r in trl._replacements() if r.name == trl.NAME)
    head, calls = place.ours, place.ours.calls
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL says that the old switch is going to leave it
        trainer, got = trl_losses(kind, tmp_path, tokenizer, **asked)
    assert len(got) == 2 and got == pytest.approx(wanted, rel=2e-4, abs=2e-5)
    assert head.calls >= calls + 2
    norm = trainer.model.model.norm(torch.randn(3, 32).to(trainer.model.device).requires_grad_())
    assert "tigon" in str(norm.grad_fn).lower()
    if switch == "use_liger_kernel":
        report = report_of(trainer.model)
        assert [report.count(slot) for slot in ("norm", "mlp", "rope")] == [5, 2, 1]
    tigon.compat.trl.uninstall()
    assert not liger.installed() and getattr(place.owner, trl.NAME) is head.original


@pytest.mark.parametrize("kind", ["SFT", "DPO", "KTO", "GRPO"])
def test_trl_in_one_line(kind, tmp_path, tokenizer, caplog, trl):
    """The callback alone: the head of this model is Tigon's, warnings and report.check() agree."""
    changes = {"cast_lm_head_to_fp32": True} if kind == "GRPO" else {}  # the head has a forward of TRL's
    wanted = trl_losses(kind, tmp_path, tokenizer, **changes)[1]
    callback = tigon.TigonTrainerCallback(strict=True)
    with caplog.at_level(logging.WARNING, "tigon"):
        trainer, got = trl_losses(kind, tmp_path, tokenizer, callbacks=[callback], **changes)
    (head,) = (r.ours for r in trl._replacements() if r.name == trl.NAME)
    assert got == pytest.approx(wanted, rel=2e-4, abs=2e-5)
    assert [r.getMessage() for r in caplog.records if r.name == "tigon"] == []
    (entry,) = (entry for entry in callback.report.entries if entry.slot == "loss")
    assert entry.by == "tigon.linear_log_prob in TRL's head"
    callback.report.check()
    calls = head.calls
    assert calls >= 2
    trl_losses(kind, tmp_path, tokenizer, **changes)
    left = tigon.TigonTrainerCallback(loss=False)
    trl_losses(kind, tmp_path, tokenizer, callbacks=[left], **changes)
    assert head.calls == calls, "in models that Tigon is not in, or whose loss it leaves"
    assert report_of(trainer.model) is callback.report


def test_trl_leaves_an_installed_liger(monkeypatch, caplog, trl):
    """Its layers are not hidden without being asked; the heads are Tigon's all the same."""
    from tigon.integrations import liger

    monkeypatch.setattr(liger, "_on_disk", lambda: "/somewhere")
    with caplog.at_level(logging.WARNING, "tigon"):
        trl.install()
    assert "replace=True" in caplog.text and not liger.installed()
    assert any(r.is_installed() for r in trl._replacements() if r.name == trl.NAME)


def test_trl_after_apply(tmp_path, tokenizer, trl):
    """A model that was patched before its trainer was made; the distillation trainer's call too."""
    from trl import SFTConfig, SFTTrainer
    from trl.trainer import utils

    datasets = pytest.importorskip("datasets")
    model = make()
    report = tigon.apply(model)
    head = getattr(utils, trl.NAME)
    with pytest.raises(tigon.Error, match="not called in training"):
        report.check()
    SFTTrainer(
        model=model,
        processing_class=tokenizer,
        args=SFTConfig(**trainer_options(tmp_path, max_steps=1, bf16=False)),
        train_dataset=datasets.Dataset.from_dict({"text": [words(i, 9) for i in range(8)]}),
    ).train()
    assert head.calls == 1
    report.check()

    class Trained:  # as DistillationTrainer calls a function that calls the head
        def __init__(self, model):
            self.model = model

        def step(self):
            def loss():
                return head.gathered(model.lm_head.weight) is not None

            return loss()

    assert Trained(model).step() and not Trained(make(seed=1)).step()
    tigon.undo(model)
    assert not Trained(model).step()


def test_check_knows_losses_that_call_tigon_themselves():
    """A loss of the program's own that takes the head's weight is what the patch is for; logits are not."""
    model, inputs = make(), batch()
    report = tigon.apply(model)
    hidden = model.model(inputs["input_ids"]).last_hidden_state
    options = {"shift": True}
    with torch.no_grad():
        tigon.linear_cross_entropy(hidden, model.lm_head.weight, inputs["labels"], **options)
    with pytest.raises(tigon.Error, match="not called in training"):
        report.check()
    tigon.linear_log_prob(hidden, model.lm_head.weight, inputs["labels"], **options).sum().backward()
    report.check()
    other = make()
    fused = tigon.apply(other)
    model(**inputs).loss.backward()  # counted by its own report
    with pytest.raises(tigon.Error, match="not called in training"):
        fused.check()
    other(inputs["input_ids"])
    tigon.linear_log_prob(hidden.detach(), model.lm_head.weight, inputs["labels"], **options)
    with pytest.raises(tigon.Error, match="logits computed at once"):
        fused.check()


@pytest.mark.parametrize(
    "outputs",
    [("is_top1", "entropy", "mean_logits"), ("entropy",), ("mean_logits",), (), ("log_sum_sq_probs",)],
)
def test_trl_head(outputs, trl):
    """Every output and every gradient of TRL's function, and its fallback."""
    from trl.trainer import utils

    trl.install()
    head = getattr(utils, "_ChunkedLogProbFunction")  # noqa: B009
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((9, 16), (29, 16), (29,))]
    target = torch.randint(0, 29, (9,), generator=generator)

    def run_head(function):
        leaves = [x.clone().requires_grad_() for x in drawn]
        got = function.apply(*leaves, target, 0.7, 8, None, 1.3, outputs)
        slope = sum((i + 1) * x.sum() for i, x in enumerate(got[:2]) if x is not None and x.requires_grad)
        slope = got[0].sum() if "is_top1" in outputs else slope
        return got, torch.autograd.grad(slope, leaves)

    got, wanted = run_head(head), run_head(head.original)
    for mine, theirs in zip((*got[0], *got[1]), (*wanted[0], *wanted[1]), strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            close(mine.float(), theirs.float(), ulps=256)


def test_trl_of_another_shape_is_refused(monkeypatch, trl):
    from trl.trainer import utils

    model = make()
    utils.add_fused_lm_head(model)
    with monkeypatch.context() as patched:
        patched.delattr(utils, trl.NAME)
        with pytest.raises(tigon.Error, match="fused head"):
            trl.install()
        patched.setattr(
            utils, trl.NAME, type("Other", (), {"forward": lambda ctx, hidden: hidden}), raising=False
        )
        report = tigon.apply(model)
        (entry,) = (entry for entry in report.entries if entry.slot == "loss")
        assert "must be one whose fused head takes" in entry.reason and not report.head_calls.said
        assert not isinstance(getattr(utils, trl.NAME), trl.LogProbHead)
    assert tigon.apply(model).count("loss") == 1


@pytest.fixture
def _switches(monkeypatch):
    """What transformers' enable_full_determinism sets is as it was afterwards."""
    for name in (
        "CUDA_LAUNCH_BLOCKING",
        "CUBLAS_WORKSPACE_CONFIG",
        "ASCEND_LAUNCH_BLOCKING",
        "HCCL_DETERMINISTIC",
        "FLASH_ATTENTION_DETERMINISTIC",
    ):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    for name in ("deterministic", "benchmark"):
        monkeypatch.setattr(torch.backends.cudnn, name, getattr(torch.backends.cudnn, name))
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kind", ["Trainer", "SFT", "GRPO"])
def test_full_determinism(kind, facade, tmp_path, tokenizer, _switches):
    """The switch of TrainingArguments is the mode: runs repeat, and a row has its bits in any batch."""
    from tigon._deterministic import is_deterministic

    options = {"full_determinism": True, "use_liger_kernel": True}
    if kind == "Trainer":
        train = functools.partial(run, tmp_path, **options)
    else:
        train = functools.partial(trl_losses, kind, tmp_path, tokenizer, **options)
    assert not is_deterministic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TRL says that use_liger_kernel is going to leave it
        (first, losses), (second, again) = train(), train()
    assert is_deterministic() and losses and losses == again
    close([*first.model.parameters()], [*second.model.parameters()], ulps=0)
    weight = first.model.lm_head.weight.detach()
    hidden, target = torch.randn(9, weight.shape[1]), torch.arange(9)
    whole = tigon.linear_log_prob(hidden, weight, target)
    assert torch.equal(whole[4:5], tigon.linear_log_prob(hidden[4:5], weight, target[4:5]))
