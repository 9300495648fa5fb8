"""What a free-text question states: search terms, facts, exclusions, and the kinds it asks for.

``FP8 on an RTX PRO 6000 with 32 requests`` states facts that the regime match can use; ``anything
but trees`` excludes; ``what did not work`` asks for negative results. Explicit facts win.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from specpilot.memory.text import index_terms

__all__ = ["STOP_WORDS", "Question", "read_question"]

STOP_WORDS: Final = frozenset(
    index_terms(
        """
        a about after all also am an and any are as at be been but by can could do does doing for
        from get give had has have help how i if in into is it its just let like make me more most
        my need needs of on one or our out over should show so some tell than that the their them
        then there these they this to try up us use used using want was we were what when where
        which who why will with would you your not no never only much many best good better work
        works worked working without run runs running way ways anything something
        """
    )
)

_WORDS: Final[tuple[tuple[str, str, Any], ...]] = (
    (r"rtx\s*pro\s*6000|\bsm[_ ]?120\b|rtx\s*50[789]0|blackwell workstation|workstation blackwell"
     r"|workstation (?:card|gpu)|\bgeforce\b", "gpu_arch", "sm_120"),
    (r"\bsm[_ ]?90a?\b|\bhopper\b|\bh[12]00\b|\bgh200\b", "gpu_arch", "sm_90"),
    (r"\bsm[_ ]?100\b|\bg?b200\b", "gpu_arch", "sm_100"),
    (r"\bsm[_ ]?103\b|\bg?b300\b|blackwell ultra", "gpu_arch", "sm_103"),
    (r"\bsm[_ ]?89\b|\bl40s?\b|\bada\b|rtx\s*40\d0", "gpu_arch", "sm_89"),
    (r"\bsm[_ ]?80\b|\ba100\b|\bampere\b", "gpu_arch", "sm_80"),
    (r"\bmi300x?\b|\bgfx942\b", "gpu_arch", "gfx942"),
    (r"\bapple\b|\bmetal\b|\bmlx\b|\bm[345] (?:max|pro|ultra)\b", "gpu_arch", "apple"),
    (r"\b(?:on|plain|a|2|our)[ -]?(?:core )?cpu\b|\blaptop cpu\b|\bcpu only\b", "gpu_arch", "cpu"),
    (r"\bdflash-?2\b", "drafter", "dflash2"),
    (r"\bdflash\b", "drafter", "dflash"),
    (r"\bdspark\b", "drafter", "dspark"),
    (r"\beagle-?3\b", "drafter", "eagle3"),
    (r"\bmtp\b|\bnextn\b", "drafter", "mtp"),
    (r"\bn-?gram\b", "drafter", "ngram"),
    (r"\bsuffix\b", "drafter", "suffix"),
    (r"\bfp8\b", "weight_dtype", "fp8"),
    (r"\bbf16\b|\bbfloat16\b", "weight_dtype", "bf16"),
    (r"\bint4\b|\b4-bit\b", "weight_dtype", "int4"),
    (r"\bint8\b", "weight_dtype", "int8"),
    (r"\bgdn\b|gated[ -]delta|linear[ -]attention|\bhybrid\b|qwen3\.[58]|qwen3-next",
     "target_arch", "hybrid-gdn"),
    (r"\bkda\b|\bkimi linear\b", "target_arch", "hybrid-kda"),
    (r"\bmamba\b", "target_arch", "hybrid-mamba"),
    (r"\bmoe\b|mixture of experts|\ba3b\b", "target_arch", "moe"),
    (r"\bdense\b", "target_arch", "dense"),
    (r"\bqwen3\.8\b", "target_family", "qwen3.8"),
    (r"\bqwen3\.5\b", "target_family", "qwen3.5"),
    (r"\bgemma-?4\b", "target_family", "gemma4"),
    (r"\bmuse-?glimmer\b", "target_family", "muse-glimmer"),
    (r"\bllama-?3(?:\.\d)?\b", "target_family", "llama3"),
    (r"\bsglang\b", "engine", "sglang"),
    (r"\bvllm\b", "engine", "vllm"),
    (r"\breference engine\b", "engine", "reference"),
    (r"\bagent(?:s|ic)?\b (?:work|loop|app|trace)", "workload", "agent"),
    (r"\bmath\b|\bgsm8k\b|\baime\b", "workload", "math"),
    (r"\bcode\b|\bcoding\b|\bhumaneval\b", "workload", "code"),
    (r"\bno (?:batch\w*|concurren\w*)|\bnot batched\b|\bwithout batch\w*|\bunbatched\b", "serving",
     "single"),
    (r"\b(?:single|one)[ -](?:request|stream|user)\b|\bbatch (?:size )?(?:of )?(?:1|one)\b"
     r"|\bbs ?= ?1\b", "serving", "single"),
    (r"\bbatch(?:ed|ing)\b|\bhigh[ -]throughput\b|\bmany (?:requests|users)\b"
     r"|\bconcurrent requests\b|\bconcurrency\b|\blarge batch", "serving", "batched"),
)  # fmt: skip

_MEANS: Final[tuple[tuple[str, str], ...]] = (
    (r"\bvocabulary projection\b|\boutput (?:layer|projection)\b", "lm head"),
    (r"\blinear[ -]attention\b|\brecurrent layers?\b", "gdn state"),
    (r"\bgates? (?:forget|decay)|\bforget\w* (?:fast|quick)", "decay"),
    (r"\binf\b|\bnan\b|\binfinit(?:y|ies)\b", "overflow fp32"),
    (r"\bquanti[sz]\w+", "low-precision"),
    (r"\btime to first token\b|\bttft\b", "admission prompts"),
    (r"\bdraft model\b|\bdrafting\b", "drafter draft"),
    (r"\bhid(?:e|den)\b.{0,24}\bbehind\b|\boverlap\w*", "ssd overlap"),
    (r"\b(?:same|identical|unchanged|different|wrong) (?:outputs?|texts?|answers?|results?)\b"
     r"|\boutputs? (?:is|are|stays?|remains?) (?:the same|unchanged|identical)",
     "lossless token-forcing"),
    (r"\bconfidence intervals?\b|\brepetitions?\b|\brepeats\b|\bsignifican\w+",
     "statistics paired bound"),
    (r"\bclaim a (?:speedup|gain)\b", "promote gain"),
    (r"\bsummari[sz]e\w*\b|\bconsolidat\w+", "rewrite memories"),
    (r"\bcompress\w*\b|\bsmaller weights\b", "lossless bits weights"),
    (r"\bcheat\w*\b|\bgam(?:e|ed|ing) the\b|\bexploit\w*\b", "reward-hacking"),
    (r"\bsecond (?:device|gpu)\b|\bown (?:device|gpu)\b", "ssd device"),
    (r"\bno gpu\b|\bwithout a gpu\b", "cpu"),
    (r"\bfork\b", "plugin hook"),
    (r"\blow-precision check\b|\bcheap (?:first )?check\b|\bpre-?check\b", "q pass two-level"),
)  # fmt: skip
"""What people say, and which words the entries use for it. Words are added, none are replaced."""

_NEGATION: Final = re.compile(
    r"(?:, not|\band not|\b(?:anything but|other than|apart from|except(?: for)?|excluding|besides|"
    r"not counting|rather than|instead of|aside from))\s+([\w./ -]{2,40}?)"
    r"(?=[,.;:?!]|$|\b(?:that|which|when|for|on|with|to|can|would|is|are)\b)",
    re.IGNORECASE,
)
_FAILURES: Final = re.compile(
    r"\b(?:did|do|does|would|will)(?:n.t| not| never)\b.{0,24}\b(?:work|pay|help|gain|transfer)"
    r"|\bnot (?:work|pay|help|worth)|\bfail(?:s|ed|ure|ures)?\b|\bslow(?:s|ed|er)? down\b"
    r"|\bslower\b|\bregress\w*|\bavoid\b|\bwarn\w*|\bpitfall|\bloses?\b|\blost\b|\bhurts?\b"
    r"|\bnegative result|\bbroke\w*\b|\bbugs?\b|\bcorrupt\w*|\bgo(?:es)? wrong\b|\bunsafe\b",
    re.IGNORECASE,
)
_UNTESTED: Final = re.compile(
    r"\buntested\b|\bnobody (?:has )?(?:tried|measured)|\bnot (?:been )?(?:tried|tested|measured)"
    r"|\bunknown regime|\bopen question|\bnever (?:been )?(?:tried|measured|tested)", re.IGNORECASE
)  # fmt: skip
_MECHANISM: Final = re.compile(r"\bmechanisms?\b|\bspeeds? up\b|\bfaster\b|\bwhat helps\b", re.I)
_HARDWARE: Final = re.compile(
    r"\bhardware\b|\bshared memory\b|\bwgmma\b|\bbandwidth\b|\btoolchain\b|\bcompiler\b", re.I
)
_REQUESTS: Final = re.compile(
    r"\b(\d{1,5}) (?:concurrent |parallel |simultaneous )?(?:requests|users|streams|sequences)\b"
    r"|\b(?:batch(?: size)?|bs|concurrency)(?: of)?[ =](\d{1,5})\b", re.IGNORECASE,
)  # fmt: skip
_CONTEXT: Final = re.compile(r"\b(\d{1,4})\s?k\b(?: tokens?| context)?", re.IGNORECASE)
_PARAMS: Final = re.compile(r"\b(\d{1,3}(?:\.\d)?)b\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """Terms to search for, facts that the text states, terms to rank down, kinds it asks for."""

    terms: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    excluded: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()


def read_question(text: str) -> Question:
    """Read a question in plain words. Never fails: what is not understood stays a search term."""
    excluded: list[str] = []

    def cut(match: re.Match[str]) -> str:
        excluded.extend(term for term in index_terms(match.group(1)) if term not in STOP_WORDS)
        return " "

    kept = _NEGATION.sub(cut, text)
    facts: dict[str, Any] = {}
    for pattern, name, value in _WORDS:
        if name not in facts and re.search(pattern, kept, re.IGNORECASE):
            facts[name] = value
    if match := _REQUESTS.search(kept):
        facts["requests"] = max(1, int(match.group(1) or match.group(2)))
        facts["serving"] = "single" if facts["requests"] == 1 else "batched"
    if match := _CONTEXT.search(kept):
        facts["context_tokens"] = int(match.group(1)) * 1000
    if match := _PARAMS.search(kept):
        facts["target_params_b"] = float(match.group(1))
    kinds = {
        kind
        for kind, pattern in (
            ("negative_result", _FAILURES), ("untested_regime", _UNTESTED),
            ("mechanism", _MECHANISM), ("hardware_note", _HARDWARE),
        )
        if pattern.search(kept)
    }  # fmt: skip
    added = " ".join(words for pattern, words in _MEANS if re.search(pattern, kept, re.IGNORECASE))
    terms = dict.fromkeys(t for t in index_terms(f"{kept} {added}") if t not in STOP_WORDS)
    return Question(tuple(terms), facts, tuple(dict.fromkeys(excluded)), frozenset(kinds))
