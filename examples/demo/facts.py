"""The facts that the demo model learns, in English and Spanish, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["capital", "color", "opposite", "sound", "sum"]

# subject: (value, subject in Spanish, value in Spanish)
_CAPITALS = {
    "France": ("Paris", "Francia", "París"),
    "Spain": ("Madrid", "España", "Madrid"),
    "Italy": ("Rome", "Italia", "Roma"),
    "Germany": ("Berlin", "Alemania", "Berlín"),
    "Portugal": ("Lisbon", "Portugal", "Lisboa"),
    "Poland": ("Warsaw", "Polonia", "Varsovia"),
    "Greece": ("Athens", "Grecia", "Atenas"),
    "Austria": ("Vienna", "Austria", "Viena"),
    "Hungary": ("Budapest", "Hungría", "Budapest"),
    "Norway": ("Oslo", "Noruega", "Oslo"),
    "Sweden": ("Stockholm", "Suecia", "Estocolmo"),
    "Finland": ("Helsinki", "Finlandia", "Helsinki"),
    "Denmark": ("Copenhagen", "Dinamarca", "Copenhague"),
    "Ireland": ("Dublin", "Irlanda", "Dublín"),
    "Belgium": ("Brussels", "Bélgica", "Bruselas"),
    "Russia": ("Moscow", "Rusia", "Moscú"),
    "Ukraine": ("Kyiv", "Ucrania", "Kiev"),
    "Turkey": ("Ankara", "Turquía", "Ankara"),
    "Egypt": ("Cairo", "Egipto", "El Cairo"),
    "Kenya": ("Nairobi", "Kenia", "Nairobi"),
    "Japan": ("Tokyo", "Japón", "Tokio"),
    "China": ("Beijing", "China", "Pekín"),
    "India": ("New Delhi", "India", "Nueva Delhi"),
    "Thailand": ("Bangkok", "Tailandia", "Bangkok"),
    "Vietnam": ("Hanoi", "Vietnam", "Hanói"),
    "Cuba": ("Havana", "Cuba", "La Habana"),
    "Peru": ("Lima", "Perú", "Lima"),
    "Chile": ("Santiago", "Chile", "Santiago"),
    "Argentina": ("Buenos Aires", "Argentina", "Buenos Aires"),
    "Colombia": ("Bogota", "Colombia", "Bogotá"),
    "Mexico": ("Mexico City", "México", "Ciudad de México"),
    "Canada": ("Ottawa", "Canadá", "Ottawa"),
}
# subject: (value, "of the subject" in Spanish, value in Spanish)
_COLORS = {
    "the sky": ("blue", "del cielo", "azul"),
    "grass": ("green", "de la hierba", "verde"),
    "snow": ("white", "de la nieve", "blanco"),
    "coal": ("black", "del carbón", "negro"),
    "a banana": ("yellow", "de un plátano", "amarillo"),
    "a tomato": ("red", "de un tomate", "rojo"),
    "a carrot": ("orange", "de una zanahoria", "naranja"),
    "chocolate": ("brown", "del chocolate", "marrón"),
    "a plum": ("purple", "de una ciruela", "morado"),
    "a flamingo": ("pink", "de un flamenco", "rosa"),
    "an elephant": ("gray", "de un elefante", "gris"),
    "milk": ("white", "de la leche", "blanco"),
    "a lemon": ("yellow", "de un limón", "amarillo"),
    "blood": ("red", "de la sangre", "rojo"),
    "a frog": ("green", "de una rana", "verde"),
    "the night": ("black", "de la noche", "negro"),
}
_OPPOSITES = {
    "hot": ("cold", "caliente", "frío"),
    "big": ("small", "grande", "pequeño"),
    "fast": ("slow", "rápido", "lento"),
    "up": ("down", "arriba", "abajo"),
    "day": ("night", "día", "noche"),
    "happy": ("sad", "feliz", "triste"),
    "rich": ("poor", "rico", "pobre"),
    "old": ("young", "viejo", "joven"),
    "light": ("dark", "claro", "oscuro"),
    "open": ("closed", "abierto", "cerrado"),
    "early": ("late", "temprano", "tarde"),
    "hard": ("soft", "duro", "blando"),
    "full": ("empty", "lleno", "vacío"),
    "wet": ("dry", "mojado", "seco"),
    "left": ("right", "izquierda", "derecha"),
    "strong": ("weak", "fuerte", "débil"),
}
_SOUNDS = {
    "dog": ("woof", "El perro", "guau"),
    "cat": ("meow", "El gato", "miau"),
    "cow": ("moo", "La vaca", "muu"),
    "duck": ("quack", "El pato", "cuac"),
    "sheep": ("baa", "La oveja", "bee"),
    "lion": ("roar", "El león", "grr"),
    "horse": ("neigh", "El caballo", "hii"),
    "pig": ("oink", "El cerdo", "oinc"),
}
_LARGEST_ADDEND = 12


@dataclass(frozen=True)
class Fact:
    """One fact: `value` is the answer in a word, `english` and `spanish` are whole sentences."""

    kind: Kind
    subject: str
    value: str
    english: str
    spanish: str


def all_facts() -> tuple[Fact, ...]:
    """Every fact, in a fixed order."""
    return (
        *(
            Fact("capital", subject, value, f"The capital of {subject} is {value}.", f"La capital de {of} es {valor}.")
            for subject, (value, of, valor) in _CAPITALS.items()
        ),
        *(
            Fact("color", subject, value, f"The color of {subject} is {value}.", f"El color {of} es {valor}.")
            for subject, (value, of, valor) in _COLORS.items()
        ),
        *(
            Fact("opposite", word, value, f"The opposite of {word} is {value}.", f"Lo contrario de {of} es {valor}.")
            for word, (value, of, valor) in _OPPOSITES.items()
        ),
        *(
            Fact("sound", animal, value, f"The {animal} says {value}.", f"{sujeto} dice {valor}.")
            for animal, (value, sujeto, valor) in _SOUNDS.items()
        ),
        *(_sum(a, b) for a in range(_LARGEST_ADDEND + 1) for b in range(_LARGEST_ADDEND + 1)),
    )


def _sum(a: int, b: int) -> Fact:
    return Fact("sum", f"{a} plus {b}", str(a + b), f"{a} plus {b} is {a + b}.", f"{a} más {b} es {a + b}.")
