"""The command line: arguments -> the library's calls -> text, files and an exit status.

Wrong input is one line ``ddtree-lab: error: ...`` on the standard error and status 2; an interrupt is status 130.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from ddtree_lab.prompts import Prompt

PROGRAM = "ddtree-lab"
BUDGET_HELP = "drafted nodes a round (default 32, at most 4096)"
MODES_HELP = "all (default) or some of ar, chain, eagle_linear, tree_walk"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        args = _parser(arguments).parse_args(arguments)
        args.command_line = shlex.join([PROGRAM, *arguments])
        status = args.run(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away; Python must not flush into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, TypeError, OSError) as error:
        with contextlib.suppress(OSError):  # the standard error may be full too
            print(f"{PROGRAM}: error: {_one_line(error)}", file=sys.stderr, flush=True)
        return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Speculative decoding with draft trees, compared on a real model.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_compare(commands.add_parser("compare", help="decode prompts in every mode and compare"))
    train = commands.add_parser("train-drafter", help="train a DFlash drafter for a target")
    if "train-drafter" in arguments:
        from ddtree_lab.training.command import add_arguments, run

        add_arguments(train)
        train.set_defaults(run=run)
    _add_trace(commands.add_parser("trace", help="show or convert recorded runs"))
    return parser


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_compare)
    parser.add_argument(
        "--target", type=_name, default="embedded", help="embedded, random:<preset>, a folder or a hub id"
    )
    parser.add_argument(
        "--drafter", type=_name, help="a folder, a hub id, toy or ngram (default: the one shipped for embedded)"
    )
    parser.add_argument("--budget", type=_budgets, default=(32,), metavar="N[,N...]", help=BUDGET_HELP)
    parser.add_argument("--modes", type=_modes, default="all", metavar="MODE[,MODE...]", help=MODES_HELP)
    parser.add_argument("--max-new-tokens", type=_whole(0), default=96, metavar="N")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompts", metavar="FILE", help=".jsonl or .txt (default: the shipped prompts)")
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt itself; may be repeated")
    parser.add_argument("--limit", type=_whole(1), metavar="N", help="use the first N prompts")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=_whole(0), default=0)
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=_threads, metavar="N", help="CPU threads (default: torch's choice)")
    parser.add_argument("--out", metavar="DIR", help="write traces, summary.json and report.html there")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier comparison in --out")


def _add_trace(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="a run, or one of its rounds, as text")
    show.add_argument("file")
    show.add_argument("--round", type=_whole(0), metavar="K", help="show the tree of round K, counted from 0")
    show.add_argument("--target", help="show token texts with this target's tokenizer")
    show.set_defaults(run=_trace_show)
    export = actions.add_parser("export", help="convert between .safetensors and .jsonl")
    export.add_argument("file")
    export.add_argument("out")
    export.set_defaults(run=_trace_export)


def _compare(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    drafter_name = args.drafter or ("embedded" if args.target == "embedded" else None)
    if drafter_name is None:
        raise ValueError(f"--drafter is needed with --target {args.target!r}: no drafter is shipped for it")

    import torch

    from ddtree_lab.accept import SamplingParams
    from ddtree_lab.compare import check_out_dir, format_table, run_comparison, summarise, write_outputs

    SamplingParams(args.temperature, args.top_k, args.top_p)
    if args.out is not None:
        check_out_dir(args.out, overwrite=args.overwrite)
    if args.threads:
        torch.set_num_threads(args.threads)

    from ddtree_lab.draft.load import load_drafter
    from ddtree_lab.target.load import load_target

    target = load_target(args.target, device=args.device, dtype=args.dtype)
    drafter = load_drafter(drafter_name, target)
    comparison = run_comparison(
        target,
        drafter,
        prompts,
        modes=args.modes,
        budgets=args.budget,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    summary = summarise(comparison)
    print(format_table(summary))
    if args.out is not None:
        from ddtree_lab.viz.tokens import token_decoder

        write_outputs(comparison, summary, args.out, decode_token=token_decoder(target), overwrite=args.overwrite)
        print(f"\nWritten to {_printable(args.out)}: report.html, summary.json, traces")
    return 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    from ddtree_lab.data_files import data_path
    from ddtree_lab.prompts import Prompt, read_prompts

    if args.prompt is not None:
        try:
            prompts = [Prompt(id=str(number), text=text) for number, text in enumerate(args.prompt, start=1)]
        except ValueError as error:
            raise ValueError(f"argument --prompt: {error}") from None
        return prompts[: args.limit]
    return read_prompts(data_path("prompts.jsonl") if args.prompts is None else args.prompts, limit=args.limit)


def _trace_show(args: argparse.Namespace) -> int:
    from ddtree_lab.trace import load_trace
    from ddtree_lab.trace.text import describe_round, describe_run

    result = load_trace(args.file)
    if args.round is not None and args.round >= len(result.rounds):
        raise ValueError(f"--round must be below {len(result.rounds)}, the rounds of {args.file}; got {args.round}")
    text = None
    if args.target is not None:
        from ddtree_lab.target.load import load_target
        from ddtree_lab.viz.tokens import token_decoder

        text = token_decoder(load_target(args.target))
    if args.round is None:
        print(describe_run(result, token_text=text))
    else:
        print(describe_round(result.rounds[args.round], token_text=text))
    return 0


def _trace_export(args: argparse.Namespace) -> int:
    from ddtree_lab.trace import load_trace, save_trace
    from ddtree_lab.trace.store import check_suffix

    check_suffix(args.out)
    save_trace(load_trace(args.file), args.out)
    return 0


def _name(text: str) -> str:
    """A name that traces can hold: not every path is UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be UTF-8, got {text!r:.60}") from None
    return text


def _whole(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {minimum}, got {text!r:.60}")
        return value

    return parse


def _budgets(text: str) -> tuple[int, ...]:
    from ddtree_lab.tree.validate import as_budget

    parse = _whole(0)
    try:
        return tuple(as_budget(parse(part)) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _threads(text: str) -> int:
    count, most = _whole(1)(text), 4 * (os.cpu_count() or 1)
    if count > most:
        raise argparse.ArgumentTypeError(f"must be at most {most}, four a CPU, got {text!r:.60}")
    return count


def _modes(text: str) -> tuple[str, ...]:
    from ddtree_lab.types import MODES

    modes = MODES if text == "all" else tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"must be all or some of {', '.join(MODES)}, got {mode!r:.60}")
    return modes


def _one_line(error: Exception) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return _printable(" ".join(text.split())) or type(error).__name__


def _printable(text: str) -> str:
    """Control and other unprintable characters spelled out, so that they do not reach the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
