"""Tables: nasty files with their documented outcomes, tasks, and splits."""

import contextlib
import gzip
import math
import re
import time
from pathlib import Path

import pytest
import torch

from posterity.datasets import read_table, split
from posterity.datasets.columns import Column, has_leading_zeros, infer_decimal
from posterity.datasets.fields import MISSING, looks_numeric, number, trouble
from posterity.datasets.kinds import infer_kind
from posterity.datasets.table import stratified
from posterity.errors import BadData

pytestmark = pytest.mark.cpu  # files are read into the memory of the CPU


def write(folder, content) -> Path:
    path = folder / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def values(table):
    """What each column says: floats, booleans, or text, by its kind, and None for what is missing."""
    found = {}
    for column in table.columns:
        kind = table.roles.kinds[column.name]
        if kind == "number":
            known = column.numbers(table.roles.decimal).tolist()
            found[column.name] = [None if math.isnan(value) else value for value in known]
        elif kind == "date":
            found[column.name] = [None if time is None else time.isoformat() for time in column.times().tolist()]
        elif kind == "boolean":
            found[column.name] = [
                None if field in MISSING else field.casefold() in ("true", "yes", "t") for field in column.fields
            ]
        else:
            found[column.name] = [None if field in MISSING else field for field in column.fields]
    return found


NO_NAMES = "The first line is data: the columns are called x1 to x2."

# name: (content, options, {column: values}, notes)
READ = {
    "plain": ("a,y\n1,0.5\n2,-1.5e1\n", {}, {"a": [1, 2], "y": [0.5, -15]}, []),
    "no newline at the end": ("a,y\n1,0.5\n2,3", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "windows line ends": ("a,y\r\n1,0.5\r\n2,3\r\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "old mac line ends": ("a,y\r1,0.5\r2,3\r", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "mixed line ends": ("a,y\r\n1,0.5\n2,3\r", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "blank lines at the end": ("a,y\n1,0.5\n2,3\n\n \n\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "blank lines between": (
        "\n\na,y\n\n1,0.5\n  \n2,3\n",
        {},
        {"a": [1, 2], "y": [0.5, 3]},
        ["2 blank lines between the rows did not count."],
    ),
    "forms of numbers": (
        "a,y\n+1.,.5\n-0,1E3\n00.10,5e-324\n9007199254740992,1.7976931348623157e308\n",
        {},
        {"a": [1, 0, 0.1, 2.0**53], "y": [0.5, 1000, 5e-324, 1.7976931348623157e308]},
        [],
    ),
    "utf-8 mark": (b"\xef\xbb\xbfa,y\n1,0.5\n2,3\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "utf-8 mark and the encoding said": (
        b"\xef\xbb\xbfa,y\n1,0.5\n2,3\n",
        {"encoding": "utf-8"},
        {"a": [1, 2], "y": [0.5, 3]},
        [],
    ),
    "utf-16 with a mark": ("é,y\n1,0.5\n2,3\n".encode("utf-16"), {}, {"é": [1, 2], "y": [0.5, 3]}, []),
    "big-endian utf-16": (b"\xfe\xff" + "é,y\n1,0.5\n2,3\n".encode("utf-16-be"), {}, {"é": [1, 2], "y": [0.5, 3]}, []),
    "latin-1": (
        "c,y\né,0.5\né,3\nu,4\n".encode("latin-1"),
        {},
        {"c": ["é", "é", "u"], "y": [0.5, 3, 4]},
        ["The file is not UTF-8 and was read as Latin-1; say the encoding if it is another."],
    ),
    "semicolons": ("a;y\n1;0.5\n2;3\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "tabs": ("a\ty\n1\t0.5\n2\t3\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "tabs inside quotes": ('c\ty\n"x\t"\t0.5\n"x\t"\t3\nu\t4\n', {}, {"c": ["x", "x", "u"], "y": [0.5, 3, 4]}, []),
    "pipes": ("a|y\n1|0.5\n2|3\n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "runs of spaces": ("  a   y  \n 1     0.5\n   2 3 \n", {}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "spaces and tabs, said": ("a \t y\n1\t0.5\n2  3\n", {"separator": "whitespace"}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "quotes between spaces": (
        'c "the y"\n"r ""e"" d" 0.5\n"r ""e"" d"\t1\nblue 2\n',
        {"target": "the y", "separator": " "},
        {"c": ['r "e" d', 'r "e" d', "blue"], "the y": [0.5, 1, 2]},
        [],
    ),
    "decimal commas": (
        "a;y\n1,5;0,25\n2;-3,5e2\n",
        {},
        {"a": [1.5, 2], "y": [0.25, -350]},
        ["Fields are separated by semicolon, and may contain comma.", "Numbers have a decimal comma."],
    ),
    "decimal commas between tabs": (
        "a\ty\n1,5\t0,25\n2\t3\n",
        {},
        {"a": [1.5, 2], "y": [0.25, 3]},
        ["Fields are separated by tab, and may contain comma.", "Numbers have a decimal comma."],
    ),
    "quoted decimal commas, said": (
        'a,y\n"1,5","0,25"\n2,"3,125"\n',
        {"decimal": ","},
        {"a": [1.5, 2], "y": [0.25, 3.125]},
        [],
    ),
    "three decimals after a comma, said": (
        "a;y\n1,500;2\n2,250;4\n",
        {"decimal": ","},
        {"a": [1.5, 2.25], "y": [2, 4]},
        ["Fields are separated by semicolon, and may contain comma."],
    ),
    "spaces around fields": (
        "a , y\n 1 ,\t0.5 \n2,\u00a03\n",
        {},
        {"a": [1, 2], "y": [0.5, 3]},
        ["Fields are separated by comma, and may contain tab."],
    ),
    "two separators fit, one said": (
        "a;b,y\n1;2,0\n1;2,1\n1;3,2\n",
        {"separator": "comma"},
        {"a;b": ["1;2", "1;2", "1;3"], "y": [0, 1, 2]},
        [],
    ),
    "quoted fields": (
        'c,y\n"a,b",0.5\n"a,b","3"\n"say ""hi""\nthere", "4"\n',
        {},
        {"c": ["a,b", "a,b", 'say "hi"\nthere'], "y": [0.5, 3, 4]},
        [],
    ),
    "quotes inside fields are letters": (
        'c,y\n5" pipe,0.5\n5" pipe,3\n"",4\n',
        {},
        {"c": ['5" pipe', '5" pipe', None], "y": [0.5, 3, 4]},
        [],
    ),
    "no names": ("1,0.5\n2,3\n", {"target": "x2"}, {"x1": [1, 2], "x2": [0.5, 3]}, [NO_NAMES]),
    "no names and no numbers": (
        "p,e\nq,e\np,f\nq,f\n",
        {"target": "x2"},
        {"x1": ["p", "q", "p", "q"], "x2": ["e", "e", "f", "f"]},
        [NO_NAMES],
    ),
    "names and no numbers": ("c,y\nq,e\np,f\nq,f\n", {}, {"c": ["q", "p", "q"], "y": ["e", "f", "f"]}, []),
    "numbers as names, said": (
        "1999,2000\n1,0.5\n2,3\n",
        {"target": "2000", "header": True},
        {"1999": [1, 2], "2000": [0.5, 3]},
        [],
    ),
    "a column without a name": (
        ",y\n7,0.5\n8,3\n",
        {},
        {"x1": [7, 8], "y": [0.5, 3]},
        ["Column 1 has no name and is called 'x1'."],
    ),
    "a separator after every line": (
        "a,y,\n1,0.5,\n2,3,\n",
        {},
        {"a": [1, 2], "y": [0.5, 3], "x3": [None, None]},
        ["Column 3 has no name and is called 'x3'."],
    ),
    "missing values": (
        "a,c,y\n,,1.5\nNA,N/A,2\nNaN,null,3\nnan,None,4\n?,NULL,5\n n/a ,none,6\n1,none,7\n2,na,8\n",
        {},
        {"a": [None] * 6 + [1, 2], "c": [None] * 5 + ["none", "none", "na"], "y": [1.5, 2, 3, 4, 5, 6, 7, 8]},
        [],
    ),
    "rows without a target": (
        "a,y\n1,0.5\n2,\n3,NA\n4,1.5\n",
        {},
        {"a": [1, 4], "y": [0.5, 1.5]},
        ["2 rows without a value in the target 'y' were left out, the first in line 3."],
    ),
    "truth values": (
        "a,b,c,y\nyes,T,false,0.5\nNo,f,,3\nYES,t,TRUE,4\n",
        {},
        {"a": [True, False, True], "b": [True, False, True], "c": [False, None, True], "y": [0.5, 3, 4]},
        [],
    ),
    "nearly truth values are categories": (
        "a,y\nyes,0.5\nno,3\nyes,4\nmaybe,5\n",
        {},
        {"a": ["yes", "no", "yes", "maybe"], "y": [0.5, 3, 4, 5]},
        [],
    ),
    "numbers as categories, said": (
        "a,y\n1,0.5\n01,3\n3+,4\n1,5\n",
        {"category": ["a"]},
        {"a": ["1", "01", "3+", "1"], "y": [0.5, 3, 4, 5]},
        [],
    ),
    "long ids as categories, said": (
        f"a,y\n{'9' * 30},0.5\n{'8' * 30},3\n{'9' * 30},4\n",
        {"category": ["a"]},
        {"a": ["9" * 30, "8" * 30, "9" * 30], "y": [0.5, 3, 4]},
        [],
    ),
    "text, dropped": ("who,a,y\nAnn,1,0.5\nBob,2,3\n", {"drop": ["who"]}, {"a": [1, 2], "y": [0.5, 3]}, []),
    "one number or nothing": (
        "a,b,y\n1,1,0.5\n,2,3\n1,3,4\n",
        {},
        {"a": ["1", None, "1"], "b": [1, 2, 3], "y": [0.5, 3, 4]},
        [],
    ),
    "any text that is the same everywhere": (
        "a,b,y\n2020-01-01,1,0.5\n2020-01-01,2,3\n",
        {},
        {"a": ["2020-01-01"] * 2, "b": [1, 2], "y": [0.5, 3]},
        [],
    ),
    "percent": ("a,y\n5%,2\n5%,3\n6.25 %,4\n,5\n", {}, {"a": [0.05, 0.05, 0.0625, None], "y": [2, 3, 4, 5]}, []),
    "thousands, said": (
        'a,b,y\n"1,234,567.5",$1,2\n"-12,345","$1,234.50",3\n999,$0,4\n',
        {"thousands": ",", "separator": ","},
        {"a": [1234567.5, -12345, 999], "b": [1, 1234.5, 0], "y": [2, 3, 4]},
        [],
    ),
    "points between thousands, said": (
        "a;y\n1.234,5;2\n1.234;3\n2,5;4\n",
        {"thousands": "."},
        {"a": [1234.5, 1234, 2.5], "y": [2, 3, 4]},
        ["Fields are separated by semicolon, and may contain comma."],
    ),
    "spaces between thousands, said": (
        "a;b;y\n1 234,5;1\u00a0000 €;2\n-12\u202f345;2 000 €;3\n2,5;999,5 €;4\n",
        {"thousands": " "},
        {"a": [1234.5, -12345, 2.5], "b": [1000, 2000, 999.5], "y": [2, 3, 4]},
        ["Fields are separated by semicolon, and may contain comma.", "Numbers have a decimal comma."],
    ),
    "apostrophes between thousands, said": (
        "a,y\n1'234.5,2\n1\u2019234\u2019567,3\n",
        {"thousands": "'"},
        {"a": [1234.5, 1234567], "y": [2, 3]},
        [],
    ),
    "the order of days and months, said": (
        "d,y\n1/2/2020,2\n3/2/2020,3\n",
        {"dates": "month-first"},
        {"d": ["2020-01-02T00:00:00", "2020-03-02T00:00:00"], "y": [2, 3]},
        [],
    ),
    "one currency": (
        "a;y\n€ 5,50;2\n-€6;3\n;4\n",
        {},
        {"a": [5.5, -6, None], "y": [2, 3, 4]},
        ["Fields are separated by semicolon, and may contain comma.", "Numbers have a decimal comma."],
    ),
    "days": (
        "d,y\n2020-01-31,2\n2020-02-01T12:30,3\n,4\n",
        {},
        {"d": ["2020-01-31T00:00:00", "2020-02-01T12:30:00", None], "y": [2, 3, 4]},
        [],
    ),
    "days with names": (
        "d,y\n31 Jan 2020,2\nFebruary 1 2020 9:30 pm,3\n",
        {},
        {"d": ["2020-01-31T00:00:00", "2020-02-01T21:30:00"], "y": [2, 3]},
        [],
    ),
    "days in one order only": (
        "d,e,f,y\n1/2/2020,1/2/2020,1.2.2020,2\n13/2/2020,1/13/2020,3.2.2020,3\n",
        {},
        {
            "d": ["2020-02-01T00:00:00", "2020-02-13T00:00:00"],
            "e": ["2020-01-02T00:00:00", "2020-01-13T00:00:00"],
            "f": ["2020-02-01T00:00:00", "2020-02-03T00:00:00"],
            "y": [2, 3],
        },
        [],
    ),
    "names in other scripts": (
        "größe,цена,年\n1,0.5,red\n2,3,red\n3,4,blau\n",
        {"target": "цена"},
        {"größe": [1, 2, 3], "цена": [0.5, 3, 4], "年": ["red", "red", "blau"]},
        [],
    ),
}

# name: (content, options, words of the error)
REFUSED = {
    "empty": ("", {}, "table.csv: the file is empty"),
    "blank": (" \r\n\n\t\n", {}, "table.csv: the file is empty"),
    "an empty pair of quotes": ('""', {}, "table.csv: the file is empty"),
    "only a mark": (b"\xef\xbb\xbf", {}, "table.csv: the file is empty"),
    "names only": ("a,b,y\n", {}, "table.csv: the file has the names of 3 columns and no rows"),
    "binary": (b"a,y\n1,2\n\x00\x01\x02", {}, "not a text file: line 3 has a NUL byte"),
    "a damaged zip archive": (b"PK\x03\x04rest", {}, "cannot be unpacked: File is not a zip file. Unpack it by other"),
    "a damaged gzip archive": (b"\x1f\x8b\x08rest", {}, "cannot be unpacked: "),
    "half a gzip archive": (gzip.compress(b"a,y\n1,2\n3,4\n")[:-9], {}, "cannot be unpacked: Compressed file ended"),
    "an array": (b"\x93NUMPY\x01\x00v\x00", {}, "not a text file but of the kind NumPy. Write it as Parquet or CSV."),
    "an Arrow file": (b"ARROW1\x00\x00rest", {}, "not a text file but of the kind Arrow. Write it as Parquet or CSV."),
    "an old spreadsheet": (b"\xd0\xcf\x11\xe0rest", {}, "not a text file but an old spreadsheet. Export it as CSV"),
    "a damaged Parquet file": (b"PAR1rest", {}, "not a Parquet file that can be read"),
    "utf-16 without a mark": ("a,y\n1,2\n".encode("utf-16-le"), {}, "not a text file: line 1 has a NUL byte"),
    "half a utf-16 letter": ("a,y\n1,2\n".encode("utf-16")[:-1], {}, "is not utf-16: truncated data"),
    "a bad byte in utf-8": (
        "c,y\né,1\né,2\n".encode() + b"\xff,3\n",
        {},
        "line 4: byte ff is not UTF-8, as the file is elsewhere",
    ),
    "a bad byte, encoding said": (b"c,y\n\xff,1\n", {"encoding": "utf-8"}, "line 2 is not utf-8: invalid start byte"),
    "one column": ("y\n1\n2\n", {}, "line 1 has one field only. A table needs a target and an input column"),
    "another separator than said": ("a,y\n1,2\n", {"separator": ";"}, "line 1 has one field only"),
    "two separators fit": (
        "a;b,c;y\n1;2,3;0\n4;5,6;1\n",
        {},
        "the fields can be separated by comma and by semicolon. Say by which (--separator)",
    ),
    "a field too many in a row": ("a,y\n1,2\n3,4,5\n6,7\n", {}, "line 3 has 3 fields where line 1 has 2 fields"),
    "a field too few in a row": ("a,b,y\n1,2,3\n4,5\n", {}, "line 3 has 2 fields where line 1 has 3 fields"),
    "a field too many in every row": (
        "a,y\n1,2,3\n4,5,6\n",
        {},
        "line 2 has 3 fields where line 1 has 2 fields, separated by comma, and so has every line after the first",
    ),
    "a separator after every row but the names": ("a,y\n1,2,\n4,5,\n", {}, "line 2 has 3 fields where line 1 has 2"),
    "decimal commas among commas": ("a,y\n1,5,2,5\n3,5,4,5\n", {}, "line 2 has 4 fields where line 1 has 2 fields"),
    "another separator in one row": ("a,y\n1,2\n3;4\n5,6\n", {}, "line 3 has 1 field where line 1 has 2 fields"),
    "a comment line": ("# by me\na,y\n1,2\n3,4\n", {}, "line 2 has 2 fields where line 1 has 1 field"),
    "an open quote": ('a,y\n1,2\n"3,4\n5,6\n', {}, 'line 3: a quote (") is opened and never closed'),
    "text after a quote": ('a,y\n1,2\n"3"x,4\n', {}, 'line 3: text follows a closing quote (")'),
    "a quote of 200,000 letters": (f'a,y\n1,2\n"{"x" * 200_000}",4\n', {}, "line 3: field larger than field limit"),
    "quotes that do not fit spaces": ('a y\n1 "2\n', {}, "line 2: the quotes do not fit"),
    "the same name twice": ("a,a,y\n1,2,3\n4,5,7\n", {}, "line 1: columns 1 and 2 have the same name 'a'"),
    "the name of a nameless column": (",x1,y\n1,2,3\n", {}, "line 1: columns 1 and 2 have the same name 'x1'"),
    "names again": ("a,y\n1,2\na,y\n3,4\n", {}, "line 3 names the columns again"),
    "names with a number": (
        "1999,y\n1,2\n3,4\n",
        {},
        "line 1 has the number '1999' in column 1 and the text 'y' in column 2, where all other lines have numbers",
    ),
    "unknown target": (
        "age,weight,y\n1,2,3\n",
        {"target": "wieght"},
        "Unknown column 'wieght'. Did you mean 'weight'?",
    ),
    "no names and a named target": (
        "1,2\n3,4\n",
        {},
        "Unknown column 'y'. Known: x1, x2. The first line was taken as data",
    ),
    "unknown drop": ("age,y\n1,3\n", {"drop": ["agee"]}, "Unknown column 'agee'. Did you mean 'age'?"),
    "unknown category": ("age,y\n1,3\n", {"category": ["agee"]}, "Unknown column 'agee'. Did you mean 'age'?"),
    "infinite": ("a,y\n1,2\ninf,3\n", {}, "line 3, column 'a': 'inf' is infinite"),
    "minus infinity": ("a,y\n1,2\n-Infinity,3\n", {}, "line 3, column 'a': '-Infinity' is infinite"),
    "too large": ("a,y\n1,2\n1e400,3\n", {}, "line 3, column 'a': '1e400' is too large: numbers end at 1.8e308"),
    "too large, in digits": (f"a,y\n1,2\n{'9' * 400},3\n", {}, "is too large: numbers end at 1.8e308"),
    "too small": ("a,y\n1,2\n1e-400,3\n", {}, "line 3, column 'a': '1e-400' is too small"),
    "30 digits": (
        "a,y\n1,2\n123456789012345678901234567890,3\n",
        {},
        "line 3, column 'a': '123456789012345678901234567890' would lose digits: whole numbers are exact up to "
        "9007199254740992 only. Take the column as categories (--category 'a'), or leave the column out (--drop 'a').",
    ),
    "one digit too many": ("a,y\n1,2\n-9007199254740993,3\n", {}, "line 3, column 'a': '-9007199254740993' would lose"),
    "hexadecimal": ("a,y\n1,2\n0x1F,3\n", {}, "line 3, column 'a': '0x1F' is hexadecimal"),
    "thousands": ('a,y\n1,2\n"1,234,567",3\n', {}, "line 3, column 'a': '1,234,567' has a thousands separator"),
    "thousands and decimals": ('a,y\n1,2\n"1,234.5",3\n', {}, "'1,234.5' has a thousands separator"),
    "points between thousands": (
        "a;y\n1,5;2\n1.234,5;3\n",
        {},
        "line 3, column 'a': '1.234,5' has a thousands separator",
    ),
    "spaces between thousands": ("a,y\n1,2\n1 234,3\n", {}, "line 3, column 'a': '1 234' has a thousands separator"),
    "underscores": ("a,y\n1,2\n1_234,3\n", {}, "'1_234' has a thousands separator"),
    "thousands or decimals": (
        "a;y\n1,500;2\n2,250;4\n",
        {},
        "line 2, column 'a': '1,500' has a thousands separator or a decimal comma, and nothing says which. "
        "Say --thousands ',' if the comma separates thousands, or --decimal ',' if decimals follow it.",
    ),
    "thousands or decimals, and the decimal mark": (
        'a,y\n"$1,500",2\n"$2,250",4\n',
        {"decimal": "."},
        "'$1,500' has a thousands separator or a decimal comma, and nothing says which. Say --thousands ','",
    ),
    "decimal commas and points": ("a;y\n1,5;2.5\n2,5;3.5\n", {}, "line 2, column 'a': '1,5' has a decimal comma where"),
    "a decimal point among commas, said": (
        "a;y\n1,5;2\n2.5;3\n",
        {"decimal": ","},
        "line 3, column 'a': '2.5' has a decimal point where a decimal comma is expected",
    ),
    "a quoted decimal comma": ('a,y\n1,2\n"1,5",3\n', {}, "line 3, column 'a': '1,5' has a decimal comma where"),
    "percent and none": ("a,y\n5%,2\n5,3\n6 %,4\n", {}, "line 2, column 'a': '5%' has a percent or currency sign"),
    "money": ("a,y\n$5.00,2\n$5.00,3\n€6,4\n", {}, "line 2, column 'a': '$5.00' has a percent or currency sign"),
    "groups that are not of three digits": (
        'a,y\n"1,234",2\n"1,23",3\n',
        {"thousands": ","},
        "line 3, column 'a': '1,23' has a decimal comma where a decimal point is expected",
    ),
    "money with thousands": (
        'a,y\n"$1,234.50",2\n$3,3\n',
        {},
        "'$1,234.50' has a thousands separator. Say the mark (--th",
    ),
    "a percentage that is none": ("a,y\n5%,2\nfive %,3\n", {}, "'five %' is text, where line 2 has the number '5%'"),
    "a typographic minus": ("a,y\n1,2\n\u22125,3\n", {}, "has a typographic minus sign"),
    "digits of another script": ("a,y\n1,2\n٣,3\n", {}, "line 3, column 'a': '٣' is not written as a plain number"),
    "the exponent letter D": ("a,y\n1.5D+03,2\n1.5D+03,3\n2.5D+03,4\n", {}, "has the exponent letter D: write E"),
    "an error of a spreadsheet": ("a,y\n1,2\n#DIV/0!,3\n", {}, "line 3, column 'a': '#DIV/0!' is the error of a"),
    "NaN with a sign": ("a,y\n1,2\n-nan,3\n", {}, "line 3, column 'a': '-nan' is not written as a plain number"),
    "text among numbers": (
        "a,y\n1,2\n2,5\nabc,3\n",
        {},
        "line 4, column 'a': 'abc' is text, where line 2 has the number '1'. Correct it, take the column as categories "
        "(--category 'a'), or leave the column out (--drop 'a').",
    ),
    "a number among text": (
        "a,y\nx,2.5\nx,5\n1,3\n",
        {},
        "line 2, column 'a': 'x' is text, where line 4 has the number '1'",
    ),
    "days in either order": (
        "d,y\n1/2/2020,2\n3/2/2020,3\n",
        {},
        "line 2, column 'd': '1/2/2020' is a date or time, which cannot be used. Day and month may be either way "
        "round: say which (--dates day-first or month-first), or leave the column out (--drop 'd').",
    ),
    "days in both orders": (
        "d,y\n13/2/2020,2\n3/22/2020,3\n",
        {},
        "'13/2/2020' is a date or time, which cannot be used. Write all rows as 2020-01-31",
    ),
    "a day that is none": ("d,y\n2020-02-30,2\n2020-02-01,3\n", {}, "line 2, column 'd': '2020-02-30' is a date or"),
    "a month alone": ("d,y\n2020-02,2\n2020-03,3\n", {}, "line 2, column 'd': '2020-02' is a date or time"),
    "days and hours": (
        "d,y\nx,2\nx,1\n2020-01-31T10:00:00Z,2\n",
        {},
        "line 4, column 'd': '2020-01-31T10:00:00Z' is a date",
    ),
    "days with slashes": (
        "d,y\n1/31/20,2\n1/31/20,3\n2/1/20,4\n",
        {},
        "line 2, column 'd': '1/31/20' is a date or time",
    ),
    "days with names and without": ("d,y\n31 Jan 2020,2\nsoon,3\n", {}, "line 2, column 'd': '31 Jan 2020' is a date"),
    "several columns": (
        "who,when,a,y\nAnn,10:00,1,0.5\nBob,9:30,x,3\n",
        {},
        "table.csv: 3 columns cannot be used. (1) column 'who' is text: 2 different values in 2 fields, none repeated. "
        "A column of categories has at most 50, and some repeated. You may leave the column out (--drop 'who'). "
        "(2) line 2, column 'when': '10:00' is a date or time, which cannot be used. Write all rows as 2020-01-31, "
        "turn it into numbers, or leave the column out (--drop 'when'). (3) line 3, column 'a': 'x' is text, where",
    ),
    "times": ("d,y\n10:00,2\n10:00,3\n9:30 pm,4\n", {}, "line 2, column 'd': '10:00' is a date or time"),
    "text, all different": (
        "who,y\nAnn,0.5\nBob,3\n",
        {},
        "table.csv: column 'who' is text: 2 different values in 2 fields, none repeated. A column of categories has at "
        "most 50, and some repeated. You may leave the column out (--drop 'who').",
    ),
    "too many categories": (
        "c,y\n" + "".join(f"c{row % 51},{row / 2}\n" for row in range(200)),
        {},
        "column 'c' is text: 51 different values in 200 fields.",
    ),
    "a name of two lines": ('"a\nb",y\nx,1\nz,2\n', {}, r"column 'a\nb' is text: 2 different"),
    "target without values": ("a,y\n1,\n2,NA\n", {}, "table.csv: the target 'y' has no values"),
    "one row": ("a,y\n1,2\n", {}, "table.csv: 1 row has the target 'y'. Two at least are needed to learn from."),
    "target that does not vary": ("a,y\n1,2\n2,2.0\n", {}, "table.csv: the target 'y' has the value '2' in every row"),
    "target of dates": (
        "a,y\n1,2020-01-01\n2,2020-01-02\n",
        {},
        "line 2, column 'y': '2020-01-01' is a date or time, which cannot be used. Turn it into numbers, or name "
        "another target.",
    ),
    "regression on text": (
        "a,y\n1,x\n2,x\n3,z\n",
        {"task": "regression"},
        "the target 'y' of a regression must be numbers. Got category values such as 'x'. Use the task classification",
    ),
    "regression on truth values": ("a,y\n1,no\n2,yes\n", {"task": "regression"}, "must be numbers. Got boolean values"),
    "classification on many numbers": (
        "a,y\n" + "".join(f"{row},{row / 2}\n" for row in range(51)),
        {"task": "classification"},
        "the target 'y' of a classification may have 50 different values. Got 51. Use the task regression",
    ),
    "everything dropped": ("a,y\n1,2\n", {"drop": ["a", "y"], "target": None}, "all of its columns are dropped"),
}


@pytest.mark.parametrize("name", READ)
def test_a_nasty_file_is_read_as_documented(tmp_path, name):
    content, options, wanted, notes = READ[name]
    table = read_table(write(tmp_path, content), **{"target": "y", "task": "auto", **options})
    assert values(table) == wanted
    said = [note for note in table.notes if "taken as classes" not in note]
    assert said == notes


@pytest.mark.parametrize("name", REFUSED)
def test_a_nasty_file_is_refused_in_the_documented_words(tmp_path, name):
    content, options, words = REFUSED[name]
    path = write(tmp_path, content)
    with pytest.raises(BadData) as caught:
        read_table(path, **{"target": "y", **options})
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert words in message
    assert "\n" not in message


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    with pytest.raises(BadData, match=r"nothing\.csv: cannot be read: No such file or directory\.$"):
        read_table(tmp_path / "nothing.csv", "y")
    with pytest.raises(
        BadData, match=r"cannot be read: Is a directory\. Name one file in it\. .*read_shards reads folders"
    ):
        read_table(tmp_path, "y")
    with pytest.raises(BadData, match=r"cannot be read: embedded null byte\.$"):
        read_table("a\0b.csv", "y")

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BadData, match=r"table\.csv: cannot be read: Permission denied\.$"):
        read_table(tmp_path / "table.csv", "y")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"separator": "tabb"}, "Unknown separator 'tabb'. Did you mean 'tab'?"),
        ({"decimal": ";"}, "read_table: decimal must be '.', ',' or None. Got ';'."),
        ({"encoding": "klingon"}, "read_table: unknown encoding 'klingon'"),
        ({"thousands": ";"}, "read_table: thousands must be one of ',' '.' ' ' \"'\" '_'. Got ';'."),
        ({"thousands": ",", "decimal": ","}, "and not the decimal mark. Got ','."),
        ({"dates": "year-first"}, "read_table: dates must be day-first, month-first or None. Got 'year-first'."),
        ({"task": "ranking"}, "read_table: task must be auto, regression or classification. Got 'ranking'."),
        ({"drop": ["y"]}, "read_table: column 'y' cannot be both the target and dropped."),
    ],
)
def test_options_are_checked(tmp_path, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_table(write(tmp_path, "a,y\n1,2\n3,4\n"), "y", **options)


@pytest.mark.parametrize(
    ("target", "task", "said"),
    [
        (["0", "1", "0", "1"], "classification", True),
        (["1", "2.0", "3", "3"], "classification", True),
        ([str(row % 10) for row in range(20)], "classification", True),
        ([str(row % 11) for row in range(22)], "regression", False),
        (["1", "2", "3", "4"], "regression", False),  # no value twice
        (["0.5", "1", "0.5", "1"], "regression", False),
        (["no", "yes", "yes", "no"], "classification", False),
        (["b", "a", "b", "c"], "classification", False),
    ],
)
def test_the_task_follows_the_target(tmp_path, target, task, said):
    rows = "".join(f"{index},{value}\n" for index, value in enumerate(target))
    table = read_table(write(tmp_path, f"a,y\n{rows}"), "y")
    assert table.roles.task == task
    assert any("they are taken as classes" in note for note in table.notes) == said


def test_a_task_that_is_given_stays(tmp_path):
    path = write(tmp_path, "a,y\n1,0\n2,1\n3,0\n4,2.5\n")
    assert read_table(path, "y").roles.task == "regression"
    assert read_table(path, "y", task="classification").roles.task == "classification"
    path = write(tmp_path, "a,y\n1,0\n2,1\n3,0\n")
    assert read_table(path, "y", task="regression").roles.task == "regression"


def test_without_a_target_nothing_is_refused_that_is_only_strange(tmp_path):
    table = read_table(write(tmp_path, "who,when,a\nAnn,2020-01-01,1e400\nBob,2020-01-02,x\n"))
    assert table.roles is None
    assert [column.fields for column in table.columns] == [("Ann", "Bob"), ("2020-01-01", "2020-01-02"), ("1e400", "x")]
    assert table.columns[0].lines.tolist() == [2, 3]
    assert len(table) == 2


def test_lines_are_those_of_the_file_whatever_quotes_hold(tmp_path):
    table = read_table(write(tmp_path, '\na,y\r\n"x\r\n\r\ny",1\r\n\n"x",2\n'))
    assert table.columns[0].lines.tolist() == [3, 7]
    assert table.columns[0].fields == ("x\r\n\r\ny", "x")


def classified(tmp_path, counts):
    rows = "".join(f"{row},c{label}\n" for label, count in enumerate(counts) for row in range(count))
    return read_table(write(tmp_path, f"a,y\n{rows}"), "y")


@pytest.mark.parametrize(("counts", "fraction", "wanted"), [
    ((50, 50), 0.2, [10, 10]),
    ((90, 10), 0.2, [18, 2]),
    ((7, 7, 6), 0.25, [2, 2, 1]),
    ((97, 2, 1), 0.5, [49, 1, 0]),  # the only row of a class is for training
    ((2, 2), 0.99, [1, 1]),
    ((3, 3), 0.01, [1, 0]),
])  # fmt: skip
def test_split_takes_its_share_of_each_class(tmp_path, counts, fraction, wanted):
    table = classified(tmp_path, counts)
    train, test = split(table, fraction, seed=3)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    assert torch.bincount(labels[test], minlength=len(counts)).tolist() == wanted
    assert torch.equal(torch.cat((train, test)).sort().values, torch.arange(sum(counts)))
    assert bool((train.diff() > 0).all())
    assert bool((test.diff() > 0).all())


def test_split_follows_the_seed_and_serves_regression(tmp_path):
    table = read_table(write(tmp_path, "a,y\n" + "".join(f"{row},{row / 7}\n" for row in range(100))), "y")
    first, again, other = (split(table, 0.3, seed)[1] for seed in (0, 0, 1))
    assert len(first) == 30
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_split_says_what_it_needs(tmp_path):
    with pytest.raises(ValueError, match="split: the table must be read with a target"):
        split(read_table(write(tmp_path, "a,y\n1,2\n")), 0.5)
    with pytest.raises(BadData, match="split: 2 rows leave none for testing"):
        stratified(torch.tensor([0, 1]), 0.5)
    for fraction in (0, 1, -0.5, float("nan"), "half"):
        with pytest.raises(ValueError, match="test_fraction must be between 0 and 1"):
            stratified(torch.zeros(10, dtype=torch.int64), fraction)


FORMS = {  # fields that begin like a number, a date or a unit, and are none
    "digits": "1{}x",
    "digits and a point": "{}.x",
    "a fraction": "0.{}x",
    "an exponent": "1e{}x",
    "a decimal comma": "{},{}x",
    "groups": "1{groups}x",
    "a sign": "-{}%x",
    "a typographic minus": "\u2212{}x",
    "hexadecimal": "0x{}y",
    "currency": "${}x",
    "a time": "12:30:00.{}x",
    "a month": "Jan{letters}!",
    "letters": "{letters}",
    "spaces": "{spaces}x",
    "zeros before a whole number": "{zeros}99999999999999999",
    "a number": "{}",
}


@pytest.mark.parametrize("form", FORMS)
def test_tests_of_a_field_take_time_in_proportion_to_its_length(tmp_path, form):
    length = 200_000  # by a pattern that backtracks this would take an hour
    parts = {"groups": ",123" * (length // 4), "letters": "a" * length, "spaces": " 1" * (length // 2)}
    field = FORMS[form].format("1" * length, "1" * length, zeros="0" * length, **parts)
    column = Column(tmp_path, "a", (field, "1", field, "b"), (2, 3, 4, 5))
    begun = time.process_time()
    for decimal in ".,":
        number(field, decimal)
        trouble(field, decimal)
    looks_numeric(field)
    infer_decimal([column], ";")
    has_leading_zeros(column)
    with contextlib.suppress(BadData):
        infer_kind(column, ".")
    assert time.process_time() - begun < 2
