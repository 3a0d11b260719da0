# Reports in a real browser: they draw, their controls work, and the console stays empty; and of a small one every figure is
# as worked by hand.
# cmake -DDEMO=toy_transformer -DSMALL=report_page -DFOLDER=... -P report_in_browser.cmake
find_program(BROWSER NAMES chromium chromium-browser google-chrome)
if(NOT BROWSER)
  message("[skipped] the report in a browser: no chromium")
  if(DEFINED ENV{CI})
    message(FATAL_ERROR "CI must not skip this: install chromium")
  endif()
  return()
endif()

# The page as its script has left it, in `out`.
function(open page out)
  execute_process(
    COMMAND ${BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 --dump-dom "file://${page}#selftest"
    OUTPUT_VARIABLE dom ERROR_VARIABLE log TIMEOUT 120)
  if(NOT dom MATCHES "data-selftest=\"ok\"")
    string(REGEX MATCH "data-selftest=\"[^\"]*\"" verdict "${dom}")
    message(FATAL_ERROR "${page}, its own test: '${verdict}'\n${log}")
  endif()
  if(log MATCHES "CONSOLE")
    message(FATAL_ERROR "${page}: the console is not empty:\n${log}")
  endif()
  string(REGEX REPLACE "<script.*</script>" "" dom "${dom}")  # its data and its source are no proof
  set(${out} "${dom}" PARENT_SCOPE)
endfunction()
function(expect text)
  string(FIND "${dom}" "${text}" found)
  if(found EQUAL -1)
    message(FATAL_ERROR "the page lacks '${text}'")
  endif()
endfunction()

set(page ${FOLDER}/report.html)
execute_process(COMMAND ${DEMO} --steps 96 --budget 24 --quiet --report ${page} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
open(${page} dom)

set(page ${FOLDER}/report_page.html)
execute_process(COMMAND ${SMALL} ${page} COMMAND_ERROR_IS_FATAL ANY)
open(${page} dom)
string(REGEX MATCHALL "data-held=\"[0-9]\"" held "${dom}")
if(NOT held STREQUAL "data-held=\"1\";data-held=\"2\";data-held=\"2\";data-held=\"0\"")
  message(FATAL_ERROR "step 1 of all heads highlights ${held}")
endif()
# What would end the data early, or be no text at all, is shown as it is.
expect("<dd>&lt;/script&gt;&lt;b&gt;&amp;amp;</dd>")
expect("<th class=\"\" scope=\"row\">3</th><td class=\"text\">\"\\&lt;/script&gt;</td><td class=\"\">2</td>")
# The three tables. Position 1: held by 2; evicted by both in step 2; the mean of 0.061, which takes three digits, and 0.501.
expect("<th class=\"\" scope=\"row\">1</th><td class=\"text\">café↵</td><td class=\"\">0</td><td class=\"\">2</td></tr>")
expect("<th class=\"\" scope=\"row\">1</th><td class=\"text\">café↵</td><td class=\"\">0</td><td class=\"\">2</td><td class=\"\">2</td><td class=\"\">0</td></tr>")
expect("<th class=\"\" scope=\"row\">1</th><td class=\"text\">café↵</td><td class=\"\">28.1 %</td><td class=\"\">2</td></tr>")
# Position 0: one layer evicts it in step 1 and gives it no weight, the other keeps it and gives it 0.06.
expect("<td class=\"text\">&lt;s&gt;</td><td class=\"\">0</td><td class=\"\">1</td><td class=\"\"></td><td class=\"\">1</td></tr>")
expect("<td class=\"text\">&lt;s&gt;</td><td class=\"\">3.0 %</td><td class=\"\">1</td></tr>")
# Figures as json_number writes them; no interval where none is known.
expect("scissorhands</th><td class=\"\">64</td><td class=\"\">40960</td><td class=\"\">0.681235</td><td class=\"\">0.65 to 0.71</td>")
expect("scissorhands</th><td class=\"\">128</td><td class=\"\">81920</td><td class=\"\">0.8</td><td class=\"\"></td>")
message("reports draw, their controls work and their figures are right, in ${BROWSER}")
