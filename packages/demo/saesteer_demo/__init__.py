"""The embedded dictionaries of saesteer and their labels; `saesteer.demo` names the files."""
