"""Numbers for people: with thousands separators, and no more digits than are significant."""

import math


def number(value: float | None, digits: int = 4) -> str:
    """Format a number with so many significant digits; the integer part is always complete.

    >>> number(71538.0657), number(0.123456), number(None)
    ('71,538', '0.1235', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    if value != 0 and not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 2}e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return _rounded(value, max(0, digits - 1 - _power(value)))


def short(value: float, digits: int = 4) -> str:
    """Format a number without trailing zeros.

    >>> short(1.0), short(66612.3), short(0.2146)
    ('1', '66,612', '0.2146')
    """
    text = number(value, digits)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


def with_ends(value: float | None, ends: list[float] | None) -> tuple[str, str]:
    """Format a number and "lower to upper", to two significant digits of half the interval's width.

    >>> with_ends(71538.0657, [69210.1, 73950.7])
    ('71,500', '69,200 to 74,000')
    >>> with_ends(0.93217, [0.91, 0.951])
    ('0.932', '0.910 to 0.951')
    """
    if value is None or ends is None or not all(map(math.isfinite, (value, *ends))):
        return number(value), ""
    half = 0.5 * (ends[1] - ends[0])
    if half <= 0:
        return number(value), f"{number(ends[0])} to {number(ends[1])}"
    largest = max(map(abs, ends))
    decimals = min(1 - _power(half), 4 if largest < 1e-6 else max(4, 3 - _power(largest)))
    lower, upper = (_rounded(end, decimals) for end in ends)
    return _rounded(value, decimals), f"{lower} to {upper}"


def with_error(value: float, error: float) -> str:
    """Format a number with its standard error, both to the first digit of the error.

    >>> with_error(160.8, 11.2), with_error(1.39e8, 2.1e6), with_error(0.00754, 2.2e-5)
    ('160 ± 10', '139,000,000 ± 2,000,000', '0.00754 ± 0.00002')
    """
    if not (error > 0 and math.isfinite(value) and math.isfinite(error)):
        return f"{number(value)} ± {number(error)}"
    return " ± ".join(_rounded(each, -_power(error)) for each in (value, error))


def share(value: float) -> str:
    """Format a share as a percentage.

    >>> share(0.0123), share(0.5)
    ('1.2 %', '50 %')
    """
    return f"{100 * value:.2g} %" if value < 0.995 else f"{100 * value:.3g} %"


def _power(value: float) -> int:
    """Return the power of ten of the first digit."""
    return math.floor(math.log10(abs(value))) if value else 0


def _rounded(value: float, decimals: int) -> str:
    text = f"{round(value, decimals):,.{max(0, min(decimals, 9))}f}"
    return text.removeprefix("-") if not text.strip("-0.,") else text  # no minus before 0
