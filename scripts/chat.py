"""`nvserve chat`: a conversation on the terminal, streamed over HTTP."""

import sys
from typing import Any

import click

from nvserve.scripts.client_http import RequestFailed, first_model, stream_chat
from nvserve.scripts.finite_float import FINITE
from nvserve.scripts.interrupts import Interrupts, watched
from nvserve.scripts.model_options import Chosen, model_options
from nvserve.scripts.own_server import endpoint_or_own


@click.command(context_settings={"show_default": True})
@click.option("--system", default=None, help="System message.")
@click.option("--max-tokens", type=int, default=256, help="Tokens of one reply at most.")
@click.option("--temperature", type=FINITE, default=0.8, help="0 is greedy.")
@model_options
def chat(system: str | None, max_tokens: int, temperature: float, chosen: Chosen) -> None:
    """Talk to a model. Ctrl-C stops a reply, Ctrl-D leaves."""
    messages = [{"role": "system", "content": system}] if system else []
    try:
        with endpoint_or_own(chosen.endpoint, chosen.flags) as endpoint:
            body: dict[str, Any] = {
                "model": first_model(endpoint),
                "messages": messages,
                "max_tokens": max_tokens,
                "temperature": temperature,
            }
            with watched() as interrupts:
                while (line := read_line(interrupts)) is not None:
                    if line.strip():
                        converse(endpoint, body, line, interrupts)
    except RequestFailed as error:
        raise click.ClickException(str(error)) from error


def converse(endpoint: str, body: dict[str, Any], line: str, interrupts: Interrupts) -> None:
    """One turn: what came of the reply joins the conversation, also when it was stopped."""
    messages = body["messages"]
    messages.append({"role": "user", "content": line})
    reply = ""
    stream = stream_chat(endpoint, body)
    try:
        with interrupts.raised():
            for text in stream:
                reply += text
                sys.stdout.write(text)
                sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" [stopped]")
    except RequestFailed as error:
        messages.pop()  # a refused turn must not spoil the next one
        click.echo(f"[{error}]", err=True)
        return
    finally:
        stream.close()
        sys.stdout.write("\n")
    messages.append({"role": "assistant", "content": reply})


def read_line(interrupts: Interrupts) -> str | None:
    """What the person says, or None at the end; Ctrl-C begins a new line."""
    while True:
        try:
            with interrupts.raised():
                return input("> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return None
