"""The command ``vllm-pp``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from vllm_pp_plugin import __version__
from vllm_pp_plugin.errors import PPPluginError

__all__ = ["main"]

EXIT_OK, EXIT_PROBLEM, EXIT_USAGE = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-pp",
        description="Look at vllm-pp-plugin, and measure it.",
        epilog="exit codes: 0 all well, 1 a problem was found, 2 wrong usage",
    )
    parser.add_argument("--version", action="version", version=f"vllm-pp-plugin {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        help="what would be on in an engine here, what would not, and why",
        description="Installs the plugin in this process as a worker would, and reports what it finds.",
        epilog="""examples:
  vllm-pp doctor
  vllm-pp doctor --json
  vllm-pp doctor --config '{"async_sends": false, "cpu_eager_pp": false}' --json""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--config", metavar="JSON", help='settings, as in additional_config["pp_plugin"]')
    doctor.add_argument(
        "-pp", "--pipeline-parallel-size", type=int, default=2, metavar="N", help="of the engine (default 2)"
    )
    doctor.add_argument("--compiled", action="store_true", help="an engine without enforce_eager")

    bench = commands.add_parser("bench", help="measure, stock and plugin in one run")
    kinds = bench.add_subparsers(dest="kind", required=True, metavar="KIND")
    sends = kinds.add_parser(
        "sends",
        help="how long a pipeline send blocks its caller",
        description="Two gloo processes send to each other through real vLLM coordinators, stock and plugin in "
        "turn, with receivers that are 0, 1 and 100 ms late. Checks that what arrived is what was sent, "
        "although the source was overwritten right after.",
        epilog="example:\n  vllm-pp bench sends --json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    sends.add_argument("--json", action="store_true", help="print JSON")
    sends.add_argument(
        "--repeats", type=int, default=12, metavar="N", help="sends a case and side (default 12, least 3)"
    )
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from vllm_pp_plugin import doctor

    if args.pipeline_parallel_size < 1:
        print("vllm-pp doctor: --pipeline-parallel-size must be at least 1", file=sys.stderr)
        return EXIT_USAGE
    result = doctor.diagnose(args.config, args.pipeline_parallel_size, not args.compiled)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        doctor.render(result)
    return EXIT_OK if result["ok"] else EXIT_PROBLEM


def _bench_sends(args: argparse.Namespace) -> int:
    from vllm_pp_plugin.bench import sends

    if args.repeats < 3:
        print("vllm-pp bench sends: --repeats must be at least 3", file=sys.stderr)
        return EXIT_USAGE
    result = sends.run(args.repeats, progress=None if args.json else sys.stderr)
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        sends.render(result)
    return EXIT_PROBLEM if any(row["corrupted"] for row in result["rows"]) else EXIT_OK


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments without the program's name; by default the process's.

    Returns:
        The exit code.
    """
    args = _parser().parse_args(argv)
    try:
        return _doctor(args) if args.command == "doctor" else _bench_sends(args)
    except PPPluginError as exc:
        print(f"vllm-pp: {exc}", file=sys.stderr)
        return EXIT_PROBLEM


if __name__ == "__main__":
    sys.exit(main())
