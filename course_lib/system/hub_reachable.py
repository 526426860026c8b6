"""Reachability of the Hugging Face Hub, tested before its client is asked."""

import ssl
import threading
import urllib.error
import urllib.request


def problem(timeout: float = 3.0) -> str | None:
    """None where the Hugging Face Hub answers, else why it does not, in a few words.

    The Hub's client retries for 23 s where there is no network; asking here first keeps an offline start fast.
    HF_HUB_OFFLINE, HF_ENDPOINT and the proxy variables are honoured.

    Args:
        timeout: seconds to wait, name resolution included.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    answer: list[str | None] = []
    # A thread, because getaddrinfo has no timeout of its own.
    probe = threading.Thread(target=lambda: answer.append(_ask(constants.ENDPOINT, timeout)), daemon=True)
    probe.start()
    probe.join(timeout)
    return answer[0] if answer else f"no answer from {constants.ENDPOINT} within {timeout:g} s"


def _ask(url: str, timeout: float) -> str | None:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout).close()
    except urllib.error.HTTPError:
        return None  # an answer, whatever its status
    except OSError as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return None  # somebody is there; the client has its own certificates and its own complaint
        return f"{url}: {getattr(reason, 'strerror', None) or reason}"
    return None
