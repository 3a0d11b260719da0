# The demo's report in a real browser: it draws, its controls work, and the console stays empty.
# cmake -DDEMO=... -DPAGE=... -P report_in_browser.cmake
find_program(BROWSER NAMES chromium chromium-browser google-chrome)
if(NOT BROWSER)
  message("[skipped] the report in a browser: no chromium")
  if(DEFINED ENV{CI})
    message(FATAL_ERROR "CI must not skip this: install chromium")
  endif()
  return()
endif()
execute_process(COMMAND ${DEMO} --steps 60 --budget 24 --quiet --report ${PAGE} OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
execute_process(
  COMMAND ${BROWSER} --headless --no-sandbox --disable-gpu --enable-logging=stderr --virtual-time-budget=5000 --dump-dom "file://${PAGE}#selftest"
  OUTPUT_VARIABLE dom ERROR_VARIABLE log TIMEOUT 120)
if(NOT dom MATCHES "data-selftest=\"ok\"")
  string(REGEX MATCH "data-selftest=\"[^\"]*\"" verdict "${dom}")
  message(FATAL_ERROR "the page's own test: '${verdict}'\n${log}")
endif()
if(log MATCHES "CONSOLE")
  message(FATAL_ERROR "the console is not empty:\n${log}")
endif()
message("the report draws and its controls work, in ${BROWSER}")
